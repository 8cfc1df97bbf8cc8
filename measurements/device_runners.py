"""Bytes of hits in a real vLLM on an accelerator, in each of its model runners.

    python measurements/device_runners.py [--at-once 6] [--json FILE]

For each case an engine of its own: vLLM's older or newer model runner, with or without asynchronous
scheduling, graphs compiled as vLLM does by default, standard or layerwise mode, the CPU tier alone
or with a disk tier. A prompt is computed; then the engine's cache is forgotten and zeroed, the
prompt hits the tier, and each block of each layer is compared, as `lmcache-xpu bench engine` does.
Then eight later turns at once hit, and their tokens are compared with those after hits in the
engine's own cache. Ends with 1 if a case failed.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich import print as show
from rich.table import Table

RUNNERS = {"older": "0", "newer": "1"}
LENGTHS = (8192, 8013, 1000)
TURNS, HISTORY, NEW, ANSWER = 8, 2048, 300, 24
SETTLE_S = 1.0  # stores go on after an answer
MARK = "CASE "
CASES = (
    ("older", "step by step", "standard"),
    ("older", "ahead", "standard"),
    ("older", "step by step", "layerwise"),
    ("newer", "step by step", "standard"),
    ("newer", "ahead", "standard"),
    ("newer", "ahead", "layerwise"),
    ("newer", "ahead", "disk"),
)


def settings_of(mode: str, schedule: str, shape: str, directory: Path) -> dict[str, Any]:
    """Return the engine's settings: a model with random weights, on the device."""
    from lmcache_xpu.bench.shapes import shape_named

    chosen = shape_named(shape)
    chosen.write(directory)
    ahead = "--async-scheduling" if schedule == "ahead" else "--no-async-scheduling"
    values = {
        **chosen.settings,
        "model": str(directory),
        "layerwise": mode == "layerwise",
        "extra_args": ["--load-format", "dummy", "--skip-tokenizer-init", ahead],
    }
    if mode == "disk":
        values |= {"disk_path": str(directory / "disk"), "disk_gib": 4}
    return values


class ExternalHits:
    """The tokens that the tiers gave so far, as vLLM's scheduler counts them.

    Its metrics would do, but before 0.28 `LLM` leaves steps without an answer out of these.
    """

    def __init__(self, scheduler: Any) -> None:
        self.tokens = 0
        self._make_stats = scheduler.make_stats
        scheduler.make_stats = self._count

    def _count(self, *arguments: Any, **named: Any) -> Any:
        stats = self._make_stats(*arguments, **named)
        self.tokens += stats.connector_prefix_cache_stats.hits
        return stats


def compared(engine: Any, hits: ExternalHits, length: int) -> dict[str, Any]:
    """Return how many blocks a hit restored, of those that it said, in the worst layer."""
    prompt = engine.prompt(length)
    engine.forget()
    engine.zero()
    cold = engine.written(prompt)
    time.sleep(SETTLE_S)
    engine.forget()
    engine.zero()
    before = hits.tokens
    warm = engine.written(prompt)
    hit = hits.tokens - before
    size = engine.scheduler.block_size
    both = [key for key in cold.keys() & warm.keys() if (key[1] + 1) * size <= hit]
    layers = zip(*(map(operator.eq, cold[key], warm[key]) for key in both), strict=True)
    equal = min(map(sum, layers), default=0)
    return {"tokens": length, "hit": hit, "blocks": len(both), "equal": equal}


def answers(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers to prompts that are asked at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = engine._llm.generate(requests, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in done]


def later_turns(engine: Any, hits: ExternalHits) -> dict[str, int]:
    """Return what later turns at once hit, and how many have the tokens they have to have."""
    histories = [engine.prompt(HISTORY) for _ in range(TURNS)]
    for history in histories:
        engine.seconds(history)
    prompts = [history + engine.prompt(NEW) for history in histories]
    expected = [answers(engine, [prompt])[0] for prompt in prompts]
    time.sleep(SETTLE_S)
    engine.forget()
    engine.zero()
    before = hits.tokens
    got = answers(engine, prompts)
    right = sum(a == b for a, b in zip(expected, got, strict=True))
    return {"turns": TURNS, "right": right, "hit": hits.tokens - before}


def run_case(runner: str, schedule: str, mode: str, shape: str) -> None:
    """Run one case in this process, and print what it showed."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner],
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: its cache is looked at
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    import torch

    from lmcache_xpu.bench.engine import Engine
    from lmcache_xpu.launch.engine_arguments import engine_variables
    from lmcache_xpu.launch.settings import Settings

    device = torch.accelerator.current_accelerator()
    with TemporaryDirectory() as directory:
        values = settings_of(mode, schedule, shape, Path(directory))
        settings = Settings.load({**values, "device": device.type if device else "cpu"})
        os.environ.update(engine_variables(settings))
        engine = Engine(settings)
        import vllm

        llm = engine._llm.llm_engine
        scheduler = llm.engine_core.engine_core.scheduler
        hits = ExternalHits(scheduler)
        worker = llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)[0]
        facts = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else str(device),
            "runner": worker,
            "scheduler": type(scheduler).__name__,
            "graphs": llm.vllm_config.compilation_config.cudagraph_mode.name,
            "mode": mode,
            "prompts": [compared(engine, hits, length) for length in LENGTHS],
            "later turns": later_turns(engine, hits),
        }
    print(MARK + json.dumps(facts), flush=True)
    os._exit(0)  # LMCache's threads would keep the process


def passed(facts: dict[str, Any]) -> bool:
    """Return whether all hits are as large as they have to be, and right."""
    prompts = all(
        prompt["hit"] >= prompt["tokens"] // 256 * 256 - 1 and prompt["equal"] == prompt["blocks"]
        for prompt in facts["prompts"]
    )
    turns = facts["later turns"]
    return prompts and turns["right"] == TURNS and turns["hit"] >= TURNS * (HISTORY // 256 * 256)


def child(case: tuple[str, str, str], shape: str, timeout_s: float) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--case", " | ".join(case), "--shape", shape]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"case": case, "error": f"no answer in {timeout_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return {"case": case, **json.loads(line.removeprefix(MARK))}
    return {"case": case, "error": (done.stdout + done.stderr)[-2000:]}


def main(
    shape: Annotated[str, typer.Option(help="the model's; see `bench engine --help`")] = "1b",
    at_once: Annotated[int, typer.Option(help="engines that share the device")] = 1,
    timeout_s: Annotated[float, typer.Option(help="that a case may take")] = 400,
    json_file: Annotated[Path | None, typer.Option("--json", help="keep the results")] = None,
    case: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run all cases; ends with 1 if any failed."""
    if case:
        runner, schedule, mode = case.split(" | ")
        run_case(runner, schedule, mode, shape)
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda each: child(each, shape, timeout_s), CASES))
    table = Table("runner", "scheduling", "mode", "graphs", "blocks equal", "answers right", "")
    for result in results:
        if "error" in result:
            table.add_row(*result["case"], "", "", "", "FAILED")
            show(result["error"])
            continue
        blocks = ", ".join(f"{each['equal']}/{each['blocks']}" for each in result["prompts"])
        turns = result["later turns"]
        right = f"{turns['right']}/{turns['turns']}"
        verdict = "ok" if passed(result) else "FAILED"
        table.add_row(*result["case"], result["graphs"], blocks, right, verdict)
    show(table)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    raise typer.Exit(int(any("error" in each or not passed(each) for each in results)))


if __name__ == "__main__":
    typer.run(main)
