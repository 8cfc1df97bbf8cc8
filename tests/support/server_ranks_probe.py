"""A real vLLM on CPU with two ranks on LMCache's server: bytes of each, and faults of the second.

Run by engine/test_server_ranks.py, with MODEL DIRECTORY; prints a JSON object last. The ranks are
processes of their own, in which the functions here that take a worker run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.ranks_probe import Case, fail_loads, mend_loads, second
from support.real_engine import CHUNK, LENGTHS, Engine, digests, prompt
from support.server_probe import answers, busy, counted, make, wait_for

# Chunks of a prompt.
FAULTS = {"fails its loads": 3, "computes behind": 4, "fails its stores": 5}


def fail_stores(worker):
    """The second rank can't read its KV cache for a store."""
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    def failing(*args):
        raise RuntimeError("planted")

    if second(worker):
        worker.gather, TorchTransfer.gather = TorchTransfer.gather, failing


def mend_stores(worker):
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    if second(worker):
        TorchTransfer.gather = worker.gather


class ServerCase(Case):
    """Prompts that are computed, and asked again when nothing is on its way to the server."""

    def settle(self) -> None:
        wait_for(self.engine, busy, until=False)

    def compute(self, tokens: list[int]) -> list[list[list[str]]]:
        cold = super().compute(tokens)
        self.settle()
        return cold

    def compute_only(self, tokens: list[int]) -> None:
        super().compute_only(tokens)
        self.settle()

    def again(self, tokens: list[int], cold: list[list[list[str]]]) -> dict[str, Any]:
        seen = super().again(tokens, cold)
        self.settle()
        return seen

    def turns(self, tokens: list[int], cold: list[list[list[str]]], count: int = 2) -> list[Any]:
        return [self.again(tokens, cold) for _ in range(count)]

    def behind(self, chunks: int) -> list[Any]:
        """Two chunks are loaded, which fails on one rank, and more computed."""
        base, tokens = prompt(2 * CHUNK), prompt(chunks * CHUNK + 51)
        tokens = base + tokens[len(base) :]
        self.engine.forget()
        self.answer = self.engine.ask(tokens, cache_salt="apart")
        cold = self.rpc(digests)
        self.settle()
        self.compute_only(base)
        return self.planted(tokens, cold, fail_loads, mend_loads)

    def planted(
        self, tokens: list[int], cold: list[list[list[str]]], plant: Callable, mend: Callable
    ) -> list[Any]:
        """Asked with a fault of one rank, and then twice without."""
        self.rpc(plant)
        faulty = self.again(tokens, cold)
        self.rpc(mend)
        return [faulty, *self.turns(tokens, cold)]


def probe(engine: Engine, server: CacheServer) -> dict[str, Any]:
    case = ServerCase(engine)
    colds = {}
    report: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        tokens = prompt(length)
        colds[name] = case.compute(tokens), case.answer
        report[name] = case.again(tokens, colds[name][0])
    tokens = prompt(FAULTS["fails its loads"] * CHUNK + 50)
    report["fails its loads"] = case.planted(tokens, case.compute(tokens), fail_loads, mend_loads)
    report["computes behind"] = case.behind(FAULTS["computes behind"])
    tokens = prompt(FAULTS["fails its stores"] * CHUNK + 50)
    case.rpc(fail_stores)
    cold = case.compute(tokens)
    case.rpc(mend_stores)
    report["fails its stores"] = case.turns(tokens, cold)
    cold, case.answer = colds["inside"]
    server.kill()
    report["killed"] = case.turns(prompt(LENGTHS["inside"]), cold)
    server.start()
    report["seen"] = wait_for(engine, answers, until=True)
    report["started again"] = case.turns(prompt(LENGTHS["inside"]), cold, 3)
    report["errors"] = case.rpc(counted)
    return report


def main(model: str, directory: Path) -> dict[str, Any]:
    server = CacheServer(directory / "server.log")
    server.start()
    try:
        return make(model, server.url, tensor_parallel_size=2).close_after(probe, server)
    finally:
        server.kill()


if __name__ == "__main__":
    model, directory = sys.argv[1:]
    end_with(lambda: main(model, Path(directory)))
