"""Prompts of an engine with several ranks, and what tests do in its ranks and see there.

The ranks are processes of their own. What takes a worker runs in one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

from support.real_engine import CHUNK, Engine, digests, prompt, restored

Blocks = list[list[list[str]]]  # digests, by rank and layer


def rank(worker) -> int:
    return worker.model_runner.parallel_config.rank


def tiers(worker) -> dict[str, Any]:
    """Of this rank in LMCache's own engine, when all that it stores is in them."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    backends = engine.storage_manager.storage_backends
    wait(list(backends["disk"]._writes.pending.values()))
    return backends


def leave_disk(worker):
    """Empty the CPU tier."""
    memory = tiers(worker)["LocalCPUBackend"]
    memory.batched_remove(memory.get_keys())


def disk_files(worker):
    return len(list(tiers(worker)["disk"]._store.directory.glob("*.lmxkv")))


def fail(worker, number, move):
    """Rank `number` can't write what it loads to its KV cache, or read what it stores.

    The move is TorchTransfer's, `scatter` or `gather`.
    """
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    def failing(*args):
        raise RuntimeError("planted")

    if rank(worker) == number:
        worker.sound = move, getattr(TorchTransfer, move)
        setattr(TorchTransfer, move, failing)


def mend(worker):
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    if hasattr(worker, "sound"):
        setattr(TorchTransfer, *worker.sound)
        del worker.sound


fail_loads = partial(fail, number=1, move="scatter")  # of the second rank


class Case:
    """Prompts that are computed, and asked again.

    Args:
        engine: that is asked.
        sources: for each rank, the one that keeps what it loads; itself by default. Both hold the
            same but for rounding: vLLM's CPU engine adds what four ranks computed in another order
            on each.
    """

    def __init__(self, engine: Engine, sources: list[int] | None = None) -> None:
        self.engine, self.rpc = engine, engine.llm.collective_rpc
        self._sources = sources

    def settle(self) -> None:
        """Wait for what a request leaves behind; nothing, where LMCache is in the ranks."""

    def compute(self, tokens: list[int], **options: Any) -> Blocks:
        self.engine.forget()
        self.answer = self.engine.ask(tokens, **options)
        blocks = self.rpc(digests)
        self.settle()
        return blocks

    def compute_only(self, tokens: list[int]) -> None:
        self.engine.forget()
        self.engine.ask(tokens)
        self.settle()

    def again(self, tokens: list[int], cold: Blocks) -> dict[str, Any]:
        """What a hit wrote, by rank; blocks of a rank may be as it or its source computed them."""
        before, begin = self.engine.external_hits(), time.monotonic()
        self.engine.forget()
        answer = self.engine.ask(tokens)
        sources = self._sources or range(len(cold))
        seen = {
            "right": answer == self.answer,
            "seconds": time.monotonic() - begin,
            "hit": self.engine.external_hits() - before,
            "restored": [
                max(restored(cold[rank], warm) for rank in own_and_source)
                for *own_and_source, warm in zip(
                    range(len(cold)), sources, self.rpc(digests), strict=True
                )
            ],
        }
        self.settle()
        return seen

    def hits(self, length: int) -> dict[str, Any]:
        """From memory, and from disk."""
        tokens = prompt(length)
        cold = self.compute(tokens)
        report = {"memory": self.again(tokens, cold)}
        self.rpc(leave_disk)
        return report | {"disk": self.again(tokens, cold)}

    def stored(self, chunks: int) -> tuple[list[int], Blocks]:
        """Store a prompt of so many chunks and a few tokens, and return what it is."""
        tokens = prompt(chunks * CHUNK + 50)
        return tokens, self.compute(tokens)

    def beginning_stored(self, chunks: int) -> tuple[list[int], Blocks]:
        """Store two chunks of such a prompt alone: the rest is computed behind their load."""
        base, tokens = prompt(2 * CHUNK), prompt(chunks * CHUNK + 51)
        tokens = base + tokens[len(base) :]
        cold = self.compute(tokens, cache_salt="apart")
        self.compute_only(base)
        return tokens, cold

    def planted(
        self,
        tokens: list[int],
        cold: Blocks,
        plant: Callable,
        undo: Callable | None = mend,
        *,
        turns: int = 1,
    ) -> list[dict[str, Any]]:
        """Ask with a fault of one rank, and then so many times without."""
        self.rpc(plant)
        faulty = self.again(tokens, cold)
        if undo:
            self.rpc(undo)
        return [faulty, *(self.again(tokens, cold) for _ in range(turns))]
