"""A real vLLM on CPU with vLLM's OffloadingConnector and a tier of files behind host memory.

Run by engine/test_vllm_offloading.py, with the arguments STEP MODEL DISK TIER. The step `fill`
computes prompts; the step `restart` asks for them in a new process, then once more with each file
damaged. Each prints a JSON object last.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from support.probes import end_with
from support.real_engine import BLOCK, Engine, prompt, sampling

PROMPTS = {"block": 4 * BLOCK, "inside": 6 * BLOCK + 77}
SUFFIX = {"ours": ".lmxkv", "fs": ".bin"}
LONG = 30 * BLOCK + 5  # whose first token is timed
ROUNDS = 5


class Offloading(Engine):
    """An engine with vLLM's own offloading and one tier of files."""

    def __init__(self, model: str, disk: str, tier: str) -> None:
        from support.offloading import ours  # names of vLLM 0.30 and newer
        from vllm import LLM

        own = {"type": "fs", "root_dir": disk}
        self.disk = Path(disk)
        self.llm = LLM(
            model,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=4096,
            max_num_batched_tokens=512,
            enforce_eager=True,
            kv_cache_memory_bytes=2**27,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "PlainSpec",
                    "spec_module_path": "support.offloading_spec",
                    "cpu_bytes_to_use": 2**28,
                    "secondary_tiers": [ours(self.disk) if tier == "ours" else own],
                },
            },
        )

    @property
    def manager(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.connector_scheduler.manager

    def settle(self) -> None:
        """Let steps pass until all that was computed is on the disk."""
        for _ in range(3):
            self.llm.generate([{"prompt_token_ids": prompt(5)}], sampling(), use_tqdm=False)
            for tier in self.manager.secondary_tiers:
                tier.drain_jobs()

    def forget_all(self) -> None:
        """Empty the engine's cache, bytes too, and host memory; the files stay."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.forget()

    def first_token(self, tokens: list[int]) -> float:
        """Seconds to the first token."""
        from vllm import SamplingParams

        begun = time.perf_counter()
        once = SamplingParams(max_tokens=1, temperature=0)
        self.llm.generate([{"prompt_token_ids": tokens}], once, use_tqdm=False)
        return time.perf_counter() - begun


def fill(engine: Offloading) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name, length in PROMPTS.items():
        engine.forget()
        report[name] = {"answer": engine.ask(prompt(length)), "blocks": engine.blocks()}
    engine.settle()
    return report


def asked(engine: Offloading, name: str) -> dict[str, Any]:
    before = engine.external_hits()
    answer = engine.ask(prompt(PROMPTS[name]))
    blocks = engine.blocks()
    return {"answer": answer, "blocks": blocks, "hit": engine.external_hits() - before}


def restart(engine: Offloading, tier: str) -> dict[str, Any]:
    from support.offloading import files  # as above

    engine.forget()
    report: dict[str, Any] = {"after": {name: asked(engine, name) for name in ("block",)}}
    engine.forget_all()
    report["after"]["inside"] = asked(engine, "inside")
    engine.forget_all()
    damaged = files(engine.disk, SUFFIX[tier])
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 4096] = b"\x3f" * 4096
        path.write_bytes(content)
    report["damaged"] = {"files": len(damaged), **asked(engine, "inside")}
    return report


def times(engine: Offloading) -> dict[str, Any]:
    """Milliseconds to the first token: computed, from the disk, and from the engine's cache."""
    report: dict[str, list[float]] = {"computed": [], "disk": [], "own": []}
    for turn in range(ROUNDS):
        tokens = prompt(LONG + turn)
        engine.forget_all()
        report["computed"].append(engine.first_token(tokens))
        engine.forget_all()
        before = engine.external_hits()
        report["disk"].append(engine.first_token(tokens))
        assert engine.external_hits() - before == LONG // BLOCK * BLOCK
        report["own"].append(engine.first_token(tokens))
    return {name: round(1e3 * statistics.median(each), 1) for name, each in report.items()}


def main(step: str, model: str, disk: str, tier: str) -> dict[str, Any]:
    engine = Offloading(model, disk, tier)
    if step == "fill":
        return engine.close_after(fill)
    return engine.close_after(times) if step == "times" else engine.close_after(restart, tier)


if __name__ == "__main__":
    end_with(lambda: main(*sys.argv[1:]))
