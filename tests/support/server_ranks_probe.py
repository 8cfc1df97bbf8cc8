"""A real vLLM on CPU with ranks on LMCache's server: bytes of each, and faults of the second.

Run by engine/test_server_ranks.py, with MODEL DIRECTORY RANKS; prints a JSON object last.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.ranks import Blocks, Case, fail, fail_loads, mend
from support.real_engine import CHUNK, LENGTHS, Engine, prompt
from support.server_asks import make
from support.server_probe import COMES_BACK_S
from support.server_workers import answers, busy, counted, wait_for

# Chunks of a prompt.
FAULTS = {"fails its loads": 3, "computes behind": 4, "fails its stores": 5}

fail_stores = partial(fail, number=1, move="gather")


class ServerCase(Case):
    """Prompts that are asked when nothing is on its way to the server."""

    def settle(self) -> None:
        wait_for(self.engine, busy, until=False)

    def turns(self, tokens: list[int], cold: Blocks) -> list[Any]:
        return [self.again(tokens, cold) for _ in range(2)]

    def turns_until_hit(self, tokens: list[int], cold: Blocks) -> list[Any]:
        """Ask again until all of it is hit, for 20 s: the scheduler may see the server later.

        What the dead server was asked may reach the next one, which then has chunks that nobody
        wrote. Their seals say so, and the prompt is stored under other keys.
        """
        end, whole = time.monotonic() + COMES_BACK_S, len(tokens) // CHUNK * CHUNK
        turns = [self.again(tokens, cold)]
        while turns[-1]["hit"] < whole and time.monotonic() < end:
            turns.append(self.again(tokens, cold))
        return turns


def probe(engine: Engine, server: CacheServer) -> dict[str, Any]:
    case = ServerCase(engine)
    colds = {}
    report: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        tokens = prompt(length)
        colds[name] = case.compute(tokens), case.answer
        report[name] = case.again(tokens, colds[name][0])
    for fault, stored in (
        ("fails its loads", case.stored),
        ("computes behind", case.beginning_stored),
    ):
        report[fault] = case.planted(*stored(FAULTS[fault]), fail_loads, turns=2)
    case.rpc(fail_stores)
    tokens, cold = case.stored(FAULTS["fails its stores"])
    case.rpc(mend)
    report["fails its stores"] = case.turns(tokens, cold)
    cold, case.answer = colds["inside"]
    server.kill()
    report["killed"] = case.turns(prompt(LENGTHS["inside"]), cold)
    server.start()
    report["seen"] = wait_for(engine, answers, until=True)
    report["started again"] = case.turns_until_hit(prompt(LENGTHS["inside"]), cold)
    report["errors"] = case.rpc(counted)
    return report


def main(model: str, directory: Path, ranks: int) -> dict[str, Any]:
    server = CacheServer(directory / "server.log")
    server.start()
    try:
        return make(model, server.url, tensor_parallel_size=ranks).close_after(probe, server)
    finally:
        server.kill()


if __name__ == "__main__":
    model, directory, ranks = sys.argv[1:]
    end_with(lambda: main(model, Path(directory), int(ranks)))
