"""A real vLLM on CPU with LMCache's server, byte by byte, also when the server fails.

Run by engine/test_server.py with the arguments STEP MODEL DIRECTORY [URL]; prints a JSON object
last.

    beside   one engine: hits, salts, a reset, and a server that is killed, hung, or damaged; its
             requests wait for their loads
    inside   the same, with loads inside the steps of their requests
    newer    as inside, with vLLM's newer model runner and asynchronous scheduling
    store    at a server's URL: what is stored for another engine
    find     another engine, which finds it

In place of a server's URL, the first three and the last two take the directory of a disk tier: then
the cache is in the engine's process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import newer_runner
from support.cache_server import CacheServer
from support.call_counts import CallCounts
from support.probes import end_with
from support.real_engine import CHUNK, LENGTHS, Engine
from support.server_asks import (
    HIT,
    asked,
    cold,
    exact,
    failed_loads,
    make,
    to_the_end,
    walk,
)
from support.server_workers import (
    answers,
    busy,
    damage,
    on_next,
    on_next_layer,
    wait_for,
    way_of_asking,
    ways,
)

COMES_BACK_S = 20
REFUSED = "lmcache_mp_l1_allocation_failure_chunks_total"


def full(engine: Engine, server: CacheServer) -> dict[str, Any]:
    """A server all of whose memory another worker holds, and after that worker ended."""
    from support.lmcache_server import Client  # with LMCache, which vLLM can't start beside

    length = 3 * CHUNK + 50  # of no other prompt
    other = Client(server, instance=2)
    held = other.hold()
    refused = server.metric(REFUSED)
    reference = cold(engine, length)
    asks = [asked(engine, reference, length)]
    end = time.monotonic() + COMES_BACK_S
    while server.metric(REFUSED) == refused and time.monotonic() < end:
        time.sleep(0.5)
    report = {"held": held, "refused": server.metric(REFUSED) - refused}
    other.unregister()
    end = time.monotonic() + COMES_BACK_S
    while not asks[-1]["hit"] and time.monotonic() < end:
        wait_for(engine, busy, until=False)
        asks.append(asked(engine, reference, length))
    return {**report, "asked": asks}


def local(engine: Engine, loads: str, calls: CallCounts) -> dict[str, Any]:
    """A cache in the engine's process."""
    references, report = exact(engine)
    report["walk"] = walk(engine, calls)
    if loads == "async":
        report["failed"] = failed_loads(engine, loads)
    return report | to_the_end(engine, references, loads)


def faults(engine: Engine, server: CacheServer, loads: str, calls: CallCounts) -> dict[str, Any]:
    from support.other_server import OtherServer

    filled = full(engine, server)
    references, report = exact(engine)
    report |= {"full": filled, "walk": walk(engine, calls)}
    reference, length = references[HIT], LENGTHS[HIT]

    def ask() -> dict[str, Any]:
        return asked(engine, reference, length)

    def comes_back(start: Callable[[], None]) -> dict[str, Any]:
        """Let the server be there again; whether what is stored then is hit.

        Asked by another prompt: what this one's stores had asked of the server comes late, and
        keeps its chunks for as long as a lease.
        """
        start()
        seen = wait_for(engine, answers, until=True)
        first = second = asked(engine, references["block"], LENGTHS["block"])
        end = time.monotonic() + COMES_BACK_S
        while time.monotonic() < end:  # on a busy machine the server may be late once more
            wait_for(engine, busy, until=False)
            second = asked(engine, references["block"], LENGTHS["block"])
            if second["hit"] == 3 * CHUNK or not second["same"]:  # all of it
                break
        return {"seen": seen, "first": first, "second": second}

    server.hang()
    report["hung"] = [ask() for _ in range(2)]
    report["goes on"] = comes_back(server.go_on)
    server.kill()
    report["killed"] = [ask() for _ in range(2)]
    with OtherServer(server.url) as other:
        for number in range(4):
            other.wait_for_pings(2)  # of both halves
            if not number:
                other.lookups.clear()  # what the killed one was asked comes late
            else:
                report.setdefault("another version", []).append(ask())
        report["asked of another version"] = other.lookups
    report["started again"] = comes_back(server.start)
    for direction in ("load", "store"):
        if direction == "store":  # nothing of this prompt is there
            engine.llm.reset_prefix_cache(reset_connector=True)
        else:
            cold(engine, length)
            report["hit before it"] = ask()
        if direction == "load" and loads == "step":
            engine.llm.collective_rpc(on_next_layer, args=(server.kill,))
        else:
            engine.llm.collective_rpc(on_next, args=(direction, server.kill))
        report[f"killed in a {direction}"] = ask()
        report[f"after a {direction}"] = comes_back(server.start)
    engine.llm.collective_rpc(damage)
    report["damaged"] = asked(engine, references["block"], LENGTHS["block"])
    wait_for(engine, busy, until=False)
    report["after damage"] = [
        asked(engine, references["block"], LENGTHS["block"])
        for _ in range(2)
        if wait_for(engine, busy, until=False)
    ]
    report |= to_the_end(engine, references, loads)
    report["asks at last"] = engine.llm.collective_rpc(way_of_asking)[0]
    return report


def store(engine: Engine, directory: Path) -> dict[str, Any]:
    references = {name: cold(engine, length) for name, length in LENGTHS.items()}
    (directory / "reference.json").write_text(json.dumps(references))
    return {name: facts["hit"] for name, facts in references.items()}


def find(engine: Engine, directory: Path) -> dict[str, Any]:
    references = json.loads((directory / "reference.json").read_text())
    report = {name: asked(engine, references[name], length) for name, length in LENGTHS.items()}
    return {**report, "ways": engine.llm.collective_rpc(ways)[0]}


def main(step: str, model: str, directory: Path, url: str) -> dict[str, Any]:
    if step in ("beside", "inside", "newer"):
        loads = "async" if step == "beside" else "step"
        if step == "newer":
            newer_runner.use()
        calls = CallCounts()
        if url:
            return make(model, url, loads).close_after(local, loads, calls)
        server = CacheServer(directory / "server.log")
        server.start()
        try:
            return make(model, server.url, loads).close_after(faults, server, loads, calls)
        finally:
            server.kill()
    if step == "find":  # whose scheduler is somebody else's
        others = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
        return make(model, url, "step", **others).close_after(find, directory)
    return make(model, url).close_after(store, directory)


if __name__ == "__main__":
    step, model, directory, *url = sys.argv[1:]
    end_with(lambda: main(step, model, Path(directory), *(url or [""])))
