"""The jobs of one engine in this process, which its parent process asks for.

    python -m lmcache_xpu.bench.jobs VALUES

VALUES is a JSON object for `Settings.load`. Jobs are lines of JSON on the standard input (see
`answer`). Answers are lines that begin with `MARK`, each a JSON object; everything else is the
engine's own output.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from lmcache_xpu.bench.shapes import Turn
from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.settings import Settings

MARK = "BENCH "
SETTLE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history


def say(**facts: Any) -> None:
    """Print one line for the parent process."""
    print(MARK + json.dumps(facts), flush=True)


class Engine:
    """A vLLM engine in this process.

    Args:
        settings: the engine's settings.
    """

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM, SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        # What is left over is for the server.
        args, _ = parser.parse_known_args(["--model", *vllm_arguments(settings)])
        self._llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
        if settings.device != "cpu":
            # As vLLM itself has it (0.32; 0.26 did not). Threads that wait for torch's next
            # parallel operation took the engine's thread up to 50 ms at a time.
            torch.set_num_threads(1)
        self._one_token = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._two_tokens = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
        self._numbers = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        """Make up a prompt of tokens that was never used before."""
        return [self._numbers.randrange(3, 8000) for _ in range(length)]

    def seconds(self, *prompts: list[int]) -> float:
        """Time these prompts, at once, until all have their first token."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        self._llm.generate(requests, self._one_token, use_tqdm=False)
        return time.perf_counter() - begin

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine keeps its prefix cache: blocks are still in use")

    def zero(self) -> None:
        """Zero the engine's KV cache."""
        self._llm.collective_rpc(_zero)

    def written(self, prompt: list[int]) -> torch.Tensor:
        """Return digests `[layers, blocks]` of a prompt's blocks, in order, without the last one.

        In the last block a hit computes a token anew, which may round in another way.
        """
        engine: Any = self._llm.llm_engine
        engine.add_request("written", {"prompt_token_ids": prompt}, self._two_tokens)
        scheduler = engine.engine_core.engine_core.scheduler
        digests: torch.Tensor | None = None
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and not outputs[0].finished and digests is None:
                (request,) = scheduler.requests
                blocks = scheduler.kv_cache_manager.get_block_ids(request)[0]
                size = len(prompt) // (len(prompt) // scheduler.block_size)
                ids = blocks[: len(prompt) // size - 1]
                count = scheduler.kv_cache_config.num_blocks
                digests = self._llm.collective_rpc(_digests, args=(ids, count))[0]
        assert digests is not None
        return digests


def _zero(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
    _synchronize()


def _digests(worker: Any, ids: Sequence[int], count: int) -> torch.Tensor:
    """Return a number per layer and block that depends on every byte and its place."""
    _synchronize()
    rows = []
    for cache in worker.model_runner.kv_caches:
        blocks = cache.movedim(list(cache.shape).index(count), 0)
        words = blocks[torch.tensor(ids, device=cache.device)].contiguous()
        words = words.view(len(ids), -1).view(torch.int16).long()
        places = torch.arange(words.shape[1], device=cache.device)
        weights = (places * 2654435761 + 40503) | 1
        rows.append((words * weights).sum(dim=1).cpu())
    return torch.stack(rows)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def python_s() -> float:
    """Time a fixed piece of Python: hosts were seen to change their speed by 1.7."""
    begin = time.perf_counter()
    for _ in range(100_000):
        pass
    return time.perf_counter() - begin


def exactness(engine: Engine, length: int) -> float:
    """Return the share of blocks, in all layers, that a hit in the tier restores to the byte."""
    prompt = engine.prompt(length)
    engine.forget()
    engine.zero()
    cold = engine.written(prompt)
    time.sleep(SETTLE_S)
    engine.forget()
    engine.zero()
    warm = engine.written(prompt)
    return float((cold == warm).float().mean())


def link_gb_s(repeats: int) -> dict[str, float]:
    """Time one large copy from pinned memory (on CPU: a plain copy) and back; GB/s."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    size = 2**30 if device else 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).fill_(1)
    device_memory = torch.ones(size, dtype=torch.uint8, device=device or "cpu")
    rates = {}
    for name, target, source in (("load", device_memory, host), ("store", host, device_memory)):
        times = []
        for _ in range(repeats + 2):
            _synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            _synchronize()
            times.append(time.perf_counter() - begin)
        rates[name] = size / sorted(times)[len(times) // 2] / 1e9
    return rates


def whole_prompt(engine: Engine, length: int, *, tier: bool) -> dict[str, float]:
    """Time a whole prompt: recomputed, in the engine's own cache, in the tier."""
    prompt = engine.prompt(length)
    seconds = {"recompute": engine.seconds(prompt)}
    time.sleep(SETTLE_S / 2)
    seconds["own prefix"] = engine.seconds(prompt)
    if tier:
        engine.forget()
        seconds["tier"] = engine.seconds(prompt)
    seconds["python"] = python_s()
    return seconds


def later_turns(engine: Engine, turns: Sequence[Turn], *, tier: bool) -> list[dict[str, float]]:
    """Time later turns at once, several times: histories in the engine's own cache, in the tier."""
    histories = [engine.prompt(turn.history) for turn in turns]

    def ask() -> float:
        return engine.seconds(
            *(
                history + engine.prompt(turn.new)
                for history, turn in zip(histories, turns, strict=True)
            )
        )

    for history in histories:
        engine.seconds(history)
    rounds = []
    for _ in range(TURN_REPEATS):
        time.sleep(SETTLE_S / 2)
        seconds = {"own prefix": ask()}
        if tier:
            time.sleep(SETTLE_S / 2)
            engine.forget()
            seconds["tier"] = ask()
        seconds["python"] = python_s()
        rounds.append(seconds)
    return rounds


def answer(engine: Engine, job: dict[str, Any], *, tier: bool) -> dict[str, Any]:
    """Do one job that the parent process asks for.

    Args:
        engine: the engine to measure.
        job: its only item names it.
        tier: whether the engine has a tier.

    Raises:
        ValueError: there is no such job.
    """
    match job:
        case {"warm up": int() as length}:  # what is compiled at first use
            return {"seconds": engine.seconds(engine.prompt(length))}
        case {"exact": int() as length}:
            return {"exact": exactness(engine, length)}
        case {"link": int() as repeats}:
            return {"link": link_gb_s(repeats)}
        case {"whole": int() as length}:
            return {"rounds": [whole_prompt(engine, length, tier=tier)]}
        case {"later": list() as turns}:
            return {"rounds": later_turns(engine, [Turn(*turn) for turn in turns], tier=tier)}
    raise ValueError(f"a job that is none: {job}")


def main() -> None:
    """Start the engine, and do jobs until the standard input ends."""
    settings = Settings.load(json.loads(sys.argv[1]))
    os.environ.update(engine_variables(settings))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: its cache is looked at
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    engine = Engine(settings)
    say(started=True)
    for line in sys.stdin:
        job = json.loads(line)
        time.sleep(SETTLE_S / 2)  # the engine before this one may still store
        say(**answer(engine, job["do"], tier=job["tier"]))
    sys.stdout.flush()
    os._exit(0)  # LMCache's threads would keep the process


if __name__ == "__main__":
    main()
