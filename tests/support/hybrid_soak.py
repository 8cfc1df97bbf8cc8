"""A soak of models with several KV cache groups: tiers too small, aborts, preemptions, every byte.

Run by `PYTHONPATH=src:tests python -m support.hybrid_soak KIND`, a kind of `hybrid_probe`. One
engine is asked about documents that no tier holds all of, many at once. Each block that a
load fills, in every group, is compared with what was stored under the same tokens. Between them
questions are asked alone, and their answers compared with the recomputed ones. The exit status is 1
where anything differs, or where nothing was evicted, preempted, aborted or hit.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import random
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import REGISTRY
from support import tiny_models
from support.hybrid_probe import (
    KINDS,
    STATES,
    TEXT_ALONE,
    Digests,
    break_loads,
    wait_until_idle,
    watch,
    zero_all,
)
from support.probes import end_with
from support.real_engine import Engine, prompt

from lmcache_xpu import versions

MODELS = {
    "windows": tiny_models.gemma3,
    "heads of two sizes": tiny_models.gemma4,
    "sinks": tiny_models.gpt_oss,
    "stretches": tiny_models.llama4,
    "states": tiny_models.qwen3_next,
    "states, dense": tiny_models.qwen3_5,
}
BLOCK, DOCUMENTS, LENGTHS, QUESTIONS = 128, 80, (260, 1100), (8, 150)  # tokens
AT_ONCE, ANSWER, ALONE_EACH = 8, 80, 200  # requests, tokens, requests
ABORTED = 0.05  # of the requests
CPU_GIB, DISK_GIB, DEVICE_BYTES = 30 / 1024, 60 / 1024, 3 * 2**23


class Bytes:
    """What was stored under a prompt's first tokens, and whether loads brought that.

    Attributes:
        compared: blocks that loads filled, over all groups.
        different: those that were never stored so.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.compared, self.different = 0, 0
        self._stored: dict[tuple[int, bytes], set[str]] = defaultdict(set)

    def watch(self, worker: Any) -> None:
        """Compare from now on."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from lmcache_xpu.model.kv_cache_groups import block_tokens

        spans = block_tokens(get_kv_transfer_group()._kv_cache_config)

        def named(chunks: Any, blocks: Digests) -> dict[tuple[int, bytes], str]:
            tokens = self.tokens[chunks.request_id.split(".")[0]]
            return {
                (group, prefix(tokens[: (place + 1) * spans[group]])): "".join(parts)
                for (group, place), parts in blocks.items()
            }

        def stored(chunks: Any, blocks: Digests) -> None:
            for key, digest in named(chunks, blocks).items():
                self._stored[key].add(digest)

        def loaded(chunks: Any, blocks: Digests) -> None:
            for key, digest in named(chunks, blocks).items():
                self.compared += 1
                self.different += digest not in self._stored[key]

        watch(worker, stored, loaded)


def prefix(tokens: list[int]) -> bytes:
    return hashlib.sha256(str(tokens).encode()).digest()


class Soak:
    """Asks about documents at random, aborts some, and compares what it is answered alone."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random, self.bytes = engine, random.Random(seed), Bytes()
        self.documents = [prompt(self.random.randrange(*LENGTHS)) for _ in range(DOCUMENTS)]
        self.requests = self.aborted = self.alone = 0
        self.wrong: list[str] = []
        self._names = count()
        self._salts = count()

    def question(self) -> list[int]:
        """A document, of which some are asked about more often, and a question."""
        document = self.documents[int(self.random.random() ** 2 * DOCUMENTS)]
        return document + prompt(10_000 + self.random.randrange(500))[: self._length()]

    def _length(self) -> int:
        return self.random.randrange(*QUESTIONS)

    def run(self, requests: int) -> None:
        """Keep so many requests at work that some are preempted, until this number was asked."""
        from vllm import SamplingParams

        core, running = self.engine.llm.llm_engine, set()
        last = self.requests + requests
        while self.requests < last or running:
            while len(running) < AT_ONCE and self.requests < last:
                name = str(next(self._names))
                self.bytes.tokens[name] = tokens = self.question()
                answer = self.random.randrange(1, ANSWER)
                sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
                core.add_request(f"{name}.", {"prompt_token_ids": tokens}, sampling)
                running.add(f"{name}.")
                self.requests += 1
            running -= {output.request_id for output in core.step() if output.finished}
            if running and self.random.random() < ABORTED / 4:
                name = self.random.choice(sorted(running))
                core.abort_request([name])
                running.discard(name)
                self.aborted += 1

    def ask_alone(self) -> None:
        """Compare the answer after a hit with that under a salt which nothing was stored under."""
        tokens = self.question()
        answers = []
        for salt in (f"computed {next(self._salts)}", "", ""):
            self.engine.llm.reset_prefix_cache()
            self.engine.llm.collective_rpc(zero_all)
            answers.append(self._ask(tokens, **({"cache_salt": salt} if salt else {})))
            wait_until_idle(self.engine)
        self.alone += 1
        if len(set(map(tuple, answers))) > 1:
            self.wrong.append(f"{len(tokens)} tokens: {answers}")

    def _ask(self, tokens: list[int], **salt: str) -> list[int]:
        from vllm import SamplingParams

        name, core = str(next(self._names)), self.engine.llm.llm_engine
        self.bytes.tokens[name] = tokens
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        core.add_request(f"{name}.", {"prompt_token_ids": tokens, **salt}, sampling)
        while True:
            for output in core.step():
                if output.finished:
                    return list(output.outputs[0].token_ids)


def soak(engine: Engine, wanted: argparse.Namespace) -> dict[str, Any]:
    run, begin = Soak(engine, wanted.seed), time.monotonic()
    engine.llm.collective_rpc(run.bytes.watch)
    if wanted.wrong:
        engine.llm.collective_rpc(break_loads, args=(slice(-1, None), slice(1)))
    while run.requests < wanted.requests and time.monotonic() - begin < wanted.limit_s:
        run.run(min(ALONE_EACH, wanted.requests - run.requests))
        wait_until_idle(engine)
        if wanted.device == "cpu":  # with bfloat16 a hit's shorter steps round otherwise
            run.ask_alone()
    installed = versions.installed()
    today, cores = datetime.now(UTC).date(), os.cpu_count()
    return {
        "date, machine": f"{today}, {platform.machine()}, {cores} cores, {wanted.device}",
        "vLLM, LMCache": f"{installed.vllm}, {installed.lmcache}",
        "requests": run.requests,
        "hit tokens": engine.external_hits(),
        "preemptions": engine.counter("num_preemptions"),
        "aborted": run.aborted,
        "blocks of loads compared": run.bytes.compared,
        "blocks that differ": run.bytes.different,
        "answers compared": run.alone if wanted.device == "cpu" else "none",
        "answers that differ": run.wrong,
        "evicted from a CPU tier of 30 MiB": counted("evicted", tier="cpu"),
        "MiB stored on a disk of 60 MiB": counted("bytes", direction="store", tier="disk") >> 20,
        "seconds": round(time.monotonic() - begin),
    }


def counted(name: str, **labels: str) -> int:
    """A counter of this package: the engine's worker is in this process."""
    return int(REGISTRY.get_sample_value(f"lmcache_xpu_{name}_total", labels) or 0)


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m support.hybrid_soak")
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="ask no more after them")
    parser.add_argument("--loads", default="async", help="the setting")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="load wrong bytes: it has to fail")
    wanted = parser.parse_args()
    sys.path.append(str(TEXT_ALONE))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(TEXT_ALONE)])
    with TemporaryDirectory() as name:
        directory = Path(name)
        options = {
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "max_num_seqs": AT_ONCE,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": DEVICE_BYTES,
            **KINDS[wanted.kind],
        }
        settings = {"cpu_gib": CPU_GIB, "disk_gib": DISK_GIB, "loads": wanted.loads}
        settings |= {"save_decode": False, "device": wanted.device}
        if wanted.device != "cpu":
            options["dtype"] = "bfloat16"  # half of the bytes: as many are preempted
            options["gpu_memory_utilization"] = 0.05  # several kinds share a device
            if wanted.kind == "heads of two sizes":  # vLLM's first choice there imports CUTLASS
                options["attention_config"] = {"backend": "TRITON_ATTN"}
        if KINDS[wanted.kind] is STATES:  # chunks of a block, as `serve` has them
            settings["chunk_tokens"] = BLOCK
            options["kv_cache_memory_bytes"] = 2**24
            if wanted.device == "cuda":  # the other kernel wants FlashInfer
                options["additional_config"] = {"gdn_prefill_backend": "triton"}
        if wanted.device != "cpu":
            options["kv_cache_memory_bytes"] //= 2
        model = str(MODELS[wanted.kind](directory))
        disk = str(directory / "disk")
        engine = Engine(
            model, disk, "standard", settings=settings, skip_tokenizer_init=True, **options
        )
        report = engine.close_after(soak, wanted)
    rows = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in report.items())]
    print("\n".join(rows), flush=True)
    different = [report["blocks that differ"], *report["answers that differ"]]
    unseen = [name for name, value in report.items() if not value and "differ" not in name]
    if any(different) or unseen:
        raise RuntimeError(f"found different: {different}, and nothing of: {unseen}")
    return report


if __name__ == "__main__":
    end_with(main)
