"""One of two engines on CPU that use one LMCache server at the same moment.

Run by engine/test_server_engines.py with MODEL DIRECTORY URL NUMBER; they meet by files in the
directory. Prints a JSON object last. The first one ends in the middle of a store: it is killed.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from support.probes import end_with
from support.real_engine import BLOCK, CHUNK, Engine, prompt
from support.server_asks import asked, make
from support.server_workers import busy, counted, on_next, wait_for

SHARED = (4 * CHUNK + 77, 3 * CHUNK + BLOCK, 2 * CHUNK + 40)
OWN = ((2 * CHUNK + 41, 3 * CHUNK + 42), (2 * CHUNK + 43, 3 * CHUNK + 44))
LAST = 3 * CHUNK + 99  # which the first engine stores when it is killed
ROUNDS = 6
AFTERWARDS_S = 45  # longer than the server waits for a worker that is silent


def compute(engine: Engine, length: int, salt: str) -> dict[str, Any]:
    """Compute a prompt under keys that nobody else has."""
    engine.forget()
    return {"answer": engine.ask(prompt(length), cache_salt=salt), "cold": engine.blocks()}


def wait_for_file(path: Path) -> None:
    end = time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.02)


def look(engine: Engine, directory: Path, number: int) -> dict[str, Any]:
    lengths = (*SHARED, *OWN[number])
    references = {n: compute(engine, n, f"reference {number}") for n in (*lengths, LAST)}
    wait_for(engine, busy, until=False)
    (directory / f"ready {number}").touch()
    for other in range(2):
        wait_for_file(directory / f"ready {other}")
    order = random.Random(number)
    rounds: list[dict[str, Any]] = []

    def ask(length: int) -> dict[str, Any]:
        rounds.append({"length": length, **asked(engine, references[length], length)})
        return rounds[-1]

    def go_round() -> None:
        for length in order.sample(lengths, len(lengths)):
            ask(length)

    for _ in range(ROUNDS):
        go_round()
    report: dict[str, Any] = {"rounds": rounds}
    if number == 0:
        (directory / "report").write_text(json.dumps(report))
        wait_for(engine, busy, until=False)

        def stop() -> None:
            (directory / "storing").touch()
            time.sleep(600)

        engine.llm.collective_rpc(on_next, args=("store", stop))
        ask(LAST)
        time.sleep(600)
    for _ in itertools.takewhile(lambda _: not (directory / "killed").exists(), itertools.count()):
        go_round()
    report["before"] = len(rounds)
    go_round()
    end = time.monotonic() + AFTERWARDS_S
    report["last"] = [ask(LAST)]
    while time.monotonic() < end:
        wait_for(engine, busy, until=False)
        time.sleep(1)
        report["last"].append(ask(LAST))
    return {**report, "errors": engine.llm.collective_rpc(counted)[0]}


def main(model: str, directory: Path, url: str, number: int) -> dict[str, Any]:
    return make(model, url).close_after(look, directory, number)


if __name__ == "__main__":
    model, directory, url, number = sys.argv[1:]
    end_with(lambda: main(model, Path(directory), url, int(number)))
