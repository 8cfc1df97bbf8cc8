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
from support.real_engine import CHUNK, LENGTHS, Engine, hit, prompt, sampling
from support.server_workers import (
    answers,
    begun_early,
    busy,
    counted,
    damage,
    half,
    on_next,
    on_next_layer,
    spoil,
    wait_for,
    watch_scheduling,
    way_of_asking,
    ways,
)

HIT = "inside"  # of the lengths
COMES_BACK_S = 20
# Of the split into steps that a prompt has which is computed as a whole.
BEGINNING, WHOLE = 2 * CHUNK + 1, 4 * CHUNK + 10  # tokens
REFUSED = "lmcache_mp_l1_allocation_failure_chunks_total"


def make(model: str, url: str, loads: str = "async", **options: Any) -> Engine:
    """Make an engine at a server, or with a cache of its own at the path of its disk tier."""
    if "://" not in url:
        return Engine(model, url, "standard", settings={"loads": loads}, **options)
    settings = {"cache": "server", "server_url": url, "loads": loads}
    return Engine(model, None, "standard", settings=settings, **options)


def cold(engine: Engine, length: int) -> dict[str, Any]:
    """Compute a prompt, wait until it is stored, and return what it was."""
    engine.forget()
    before = engine.external_hits()
    answer = engine.ask(prompt(length))
    facts = {"answer": answer, "hit": engine.external_hits() - before, "cold": engine.blocks()}
    wait_for(engine, busy, until=False)
    return facts


def asked(engine: Engine, reference: dict[str, Any], length: int, **options: Any) -> dict[str, Any]:
    """Ask again with an empty cache; how it went beside `reference`."""
    begin = time.monotonic()
    facts = hit(engine, prompt(length), reference["cold"], **options)
    return {
        "same": facts["answer"] == reference["answer"],
        "hit": facts["hit"],
        "restored": facts["restored"],
        "seconds": time.monotonic() - begin,
    }


def salted(engine: Engine, salt: str) -> int:
    engine.forget()
    before = engine.external_hits()
    engine.ask(prompt(LENGTHS[HIT]), cache_salt=salt)
    wait_for(engine, busy, until=False)
    return engine.external_hits() - before


# What LMCache's connector reads in a request, as no client should send it.
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"cached_token_stats": True},
    {"disagg_spec": {}, "ret_first_tok": True},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"lmcache.max_offload_tokens": "many"},
    {"lmcache.max_offload_tokens": [], "lmcache.skip_save": {}},
    {"lmcache.tag.user": {"a": []}},
    {"": {"": []}},
)


def strange(engine: Engine) -> list[bool]:
    """Whether each request with such parameters is answered as another one is."""
    tokens = prompt(CHUNK + 70)
    expected, same = engine.ask(tokens), []
    for parameters in PARAMETERS:
        options = sampling()
        options.extra_args = {"kv_transfer_params": parameters}
        engine.forget()
        [answer] = engine.llm.generate({"prompt_token_ids": tokens}, options, use_tqdm=False)
        same.append(list(answer.outputs[0].token_ids) == expected)
    return same


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


def exact(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hits of each length, salts, and requests with strange parameters."""
    references = {name: cold(engine, length) for name, length in LENGTHS.items()}
    engine.llm.collective_rpc(watch_scheduling)
    return references, {
        "first": {name: facts["hit"] for name, facts in references.items()},
        "hits": {n: asked(engine, references[n], LENGTHS[n]) for n in LENGTHS},
        "salts": [salted(engine, salt) for salt in ("a", "a", "b")],
        "strange": strange(engine),
        "errors before": engine.llm.collective_rpc(counted)[0],
        "asks": engine.llm.collective_rpc(way_of_asking)[0],
        "begun early": engine.llm.collective_rpc(begun_early)[0],
    }


def failed_loads(engine: Engine, loads: str) -> dict[str, Any]:
    """Loads and stores that fail, in steps and beside; what came of them."""
    report: dict[str, Any] = {}
    reference, length = cold(engine, LENGTHS[HIT]), LENGTHS[HIT]

    def fail() -> None:
        raise OSError("planted")

    for direction in ("load", "store"):
        if direction == "store":
            engine.llm.reset_prefix_cache(reset_connector=True)
        if direction == "load" and loads == "step":
            engine.llm.collective_rpc(on_next_layer, args=(fail,))
        else:
            engine.llm.collective_rpc(on_next, args=(direction, fail))
        report[direction] = [asked(engine, reference, length)]
        wait_for(engine, busy, until=False)
        report[direction].append(asked(engine, reference, length))
    return report


def walk(engine: Engine, calls: CallCounts) -> dict[str, Any]:
    """Which functions of this package a store and a hit run."""
    engine.forget()
    tokens = prompt(LENGTHS[HIT] + 1)  # of no other prompt
    report = {}
    for name in ("store", "hit"):
        with calls.counting():
            engine.ask(tokens)
            wait_for(engine, busy, until=False)
        report[name] = calls.report()
        engine.forget()
    return report


def local(engine: Engine, loads: str, calls: CallCounts) -> dict[str, Any]:
    """A cache in the engine's process."""
    references, report = exact(engine)
    report["walk"] = walk(engine, calls)
    report["scheduler"] = scheduling(engine)
    if loads == "step":
        report["spoiled"] = spoiled(engine)
        report["computed"] = computed(engine)
        report["at once"] = at_once(engine)
    else:
        report["failed"] = failed_loads(engine, loads)
    report["aborted"] = aborted(engine, LENGTHS["block"], loads)
    report["after aborts"] = asked(engine, references["block"], LENGTHS["block"])
    engine.llm.reset_prefix_cache(reset_connector=True)
    report["reset"] = asked(engine, references["block"], LENGTHS["block"])
    wait_for(engine, busy, until=False)
    report["after the reset"] = asked(engine, references["block"], LENGTHS["block"])
    report["errors"] = engine.llm.collective_rpc(counted)[0]
    report["ways"] = engine.llm.collective_rpc(ways)[0]
    return report


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
    report["scheduler"] = scheduling(engine)
    if loads == "step":
        report["spoiled"] = spoiled(engine)
        report["computed"] = computed(engine)
        report["at once"] = at_once(engine)
    report["aborted"] = aborted(engine, LENGTHS["block"], loads)
    report["after aborts"] = asked(engine, references["block"], LENGTHS["block"])
    engine.llm.reset_prefix_cache(reset_connector=True)
    report["reset"] = asked(engine, references["block"], LENGTHS["block"])
    wait_for(engine, busy, until=False)
    report["after the reset"] = asked(engine, references["block"], LENGTHS["block"])
    report["errors"] = engine.llm.collective_rpc(counted)[0]
    report["ways"] = engine.llm.collective_rpc(ways)[0]
    report["asks at last"] = engine.llm.collective_rpc(way_of_asking)[0]
    return report


def scheduling(engine: Engine) -> dict[str, bool]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    core = engine.llm.llm_engine.engine_core.engine_core
    return {
        "class runs ahead": isinstance(core.scheduler, AsyncScheduler),
        "engine runs ahead": core.async_scheduling,
    }


def beginning_stored(engine: Engine) -> dict[str, Any]:
    """Let the server have the beginning of a prompt alone; what the whole is."""
    reference = cold(engine, WHOLE)
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask(prompt(WHOLE)[:BEGINNING])
    wait_for(engine, busy, until=False)
    return reference


def twice(engine: Engine, reference: dict[str, Any], between: Callable[[], None]) -> list[Any]:
    """Ask for a whole prompt, and again."""
    report = []
    for _ in range(2):
        report.append(asked(engine, reference, WHOLE))
        wait_for(engine, busy, until=False)
        between()
    return report


def spoiled(engine: Engine) -> list[dict[str, Any]]:
    """Load the beginning of a prompt in the step that computes and stores its end, and fail."""
    reference = beginning_stored(engine)
    engine.llm.collective_rpc(spoil)
    return twice(engine, reference, lambda: None)


def computed(engine: Engine) -> dict[str, Any]:
    """Compute the beginning of a prompt, though the server has it, and store its end."""
    reference = beginning_stored(engine)
    core = engine.llm.llm_engine.engine_core.engine_core
    policy = core.scheduler.connector.scheduler_half.policy
    policy.computes = lambda loaded, computed: True

    def load_again() -> None:
        vars(policy).pop("computes", None)

    asked_twice = twice(engine, reference, load_again)
    return {"asked": asked_twice, "ways": engine.llm.collective_rpc(ways)[0]["computed"]}


def at_once(engine: Engine) -> dict[str, Any]:
    """Ask for several prompts at once, whose hits are loaded in one step."""
    references = [cold(engine, length) for length in LENGTHS.values()]
    engine.forget()
    before = engine.external_hits()
    answers = engine.ask_at_once([prompt(length) for length in LENGTHS.values()])
    return {
        "same": answers == [facts["answer"] for facts in references],
        "hit": engine.external_hits() - before,
    }


def aborted(engine: Engine, length: int, loads: str) -> dict[str, Any]:
    """Abort requests before, in and after their loads; how many they waited for."""
    engine.forget()
    llm, loading = engine.llm.llm_engine, 0
    if loads == "async":
        engine.llm.collective_rpc(on_next, args=("load", lambda: time.sleep(0.3)))
    for steps in (0, 1, 2, 3, 4, 8, 16, 100):
        llm.add_request(f"aborted-{steps}", {"prompt_token_ids": prompt(length)}, sampling())
        for _ in range(steps):
            llm.step()
            time.sleep(0.005)  # for the look-up's answer
        loading += engine.llm.collective_rpc(is_loading)[0]
        llm.abort_request([f"aborted-{steps}"])
        for _ in range(5):
            llm.step()
    while llm.has_unfinished_requests():
        llm.step()
    end = time.monotonic() + 5
    while not engine.llm.reset_prefix_cache() and time.monotonic() < end:
        llm.step()
    return {"loading": loading, "freed": engine.llm.reset_prefix_cache()}


def is_loading(worker) -> bool:
    return bool(half().transfers._loads.transfers())


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
