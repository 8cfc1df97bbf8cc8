"""What an engine with a cache is asked, at a server or in its process; see `server_probe`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.call_counts import CallCounts
from support.real_engine import CHUNK, LENGTHS, Engine, hit, prompt, sampling
from support.server_workers import (
    begun_early,
    busy,
    counted,
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
# Of the split into steps that a prompt has which is computed as a whole.
BEGINNING, WHOLE = 2 * CHUNK + 1, 4 * CHUNK + 10  # tokens


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


def to_the_end(engine: Engine, references: dict[str, Any], loads: str) -> dict[str, Any]:
    """Loads that fail or are not worth it, aborts and a reset; and what was counted in all."""
    report: dict[str, Any] = {"scheduler": scheduling(engine)}
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
    return report
