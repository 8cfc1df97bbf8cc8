"""A vLLM engine in this process, whose KV cache can be emptied and looked at."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lmcache_xpu.launch.engine_arguments import vllm_arguments
from lmcache_xpu.launch.settings import Settings

__all__ = ["Engine", "Output", "synchronize"]

STORED_S = 10.0  # limit of the stores' time


class Output(NamedTuple):
    """The new tokens of one request, named as by `Engine.add`, and whether they are its last."""

    request: str
    tokens: list[int]
    finished: bool


class Engine:
    """A vLLM engine of some settings, in this process."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM, SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args, _ = parser.parse_known_args(["--model", *vllm_arguments(settings)])  # else: server's
        self._llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
        self._engine: Any = self._llm.llm_engine
        if settings.device != "cpu":
            # As vLLM has it from 0.32 on: threads that wait for torch's next parallel operation
            # take the CPU from the engine's thread.
            torch.set_num_threads(1)
        self._one_token = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._numbers = random.Random(1)
        self._names = map(str, itertools.count())

    def prompt(self, length: int) -> list[int]:
        """Make up a prompt of tokens that was never used before."""
        return [self._numbers.randrange(3, 8000) for _ in range(length)]

    def seconds(self, *prompts: list[int]) -> float:
        """Time these prompts, at once, until all have their first token."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        self._llm.generate(requests, self._one_token, use_tqdm=False)
        return time.perf_counter() - begin

    def add(self, prompt: list[int], tokens: int) -> str:
        """Add a request whose answer has so many tokens; return its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name := next(self._names), {"prompt_token_ids": prompt}, how)
        return name

    def step(self) -> list[Output]:
        """Compute one step of all requests that were added; return its tokens."""
        return [
            Output(output.request_id, list(output.outputs[0].token_ids), output.finished)
            for output in self._engine.step()
        ]

    def forget(self) -> None:
        """Empty the engine's own prefix cache; waits for stores that keep blocks of it."""
        deadline = time.perf_counter() + STORED_S
        while not self._llm.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise RuntimeError("the engine keeps its prefix cache: blocks are still in use")
            time.sleep(0.01)
            self.step()  # vLLM learns of ended stores in a step

    def zero(self) -> None:
        """Zero the engine's KV cache."""
        self._llm.collective_rpc(_zero)

    def written(self, prompt: list[int]) -> torch.Tensor:
        """Return digests of a prompt's blocks, in order, without the last one.

        In the last block a hit computes a token anew, which may be rounded otherwise.

        Returns:
            `[ranks * layers, blocks]`, all layers of the first rank before those of the next.
        """
        self.add(prompt, 2)
        scheduler = self._engine.engine_core.engine_core.scheduler
        digests: torch.Tensor | None = None
        while self._engine.has_unfinished_requests():
            outputs = self.step()
            if outputs and not outputs[0].finished and digests is None:
                (request,) = scheduler.requests
                blocks = scheduler.kv_cache_manager.get_block_ids(request)[0]
                size = len(prompt) // (len(prompt) // scheduler.block_size)
                ids = blocks[: len(prompt) // size - 1]
                count = scheduler.kv_cache_config.num_blocks
                digests = torch.cat(self._llm.collective_rpc(_digests, args=(ids, count)))
        assert digests is not None
        return digests


def _zero(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
    synchronize()


def _digests(worker: Any, ids: Sequence[int], count: int) -> torch.Tensor:
    """Return a number per layer and block that depends on every byte and its place."""
    synchronize()
    rows = []
    for cache in worker.model_runner.kv_caches:
        blocks = cache.movedim(list(cache.shape).index(count), 0)
        words = blocks[torch.tensor(ids, device=cache.device)].contiguous()
        words = words.view(len(ids), -1).view(torch.int16).long()
        places = torch.arange(words.shape[1], device=cache.device)
        weights = (places * 2654435761 + 40503) | 1
        rows.append((words * weights).sum(dim=1).cpu())
    return torch.stack(rows)


def synchronize(devices: int | None = None) -> None:
    """Wait until the first so many devices, or the current one, are idle; a CPU always is."""
    if torch.accelerator.is_available():
        for device in [None] if devices is None else range(devices):
            torch.accelerator.synchronize(device)
