"""A real vLLM on CPU, of whose scheduler's hooks one fails for a request.

Run by attacks/test_scheduler_hooks.py with the arguments PLACE MODEL DIRECTORY, where PLACE is
"in-process" or "server". Prints a JSON object last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.real_engine import CHUNK, Engine, prompt
from support.server_workers import busy, wait_for

HOOKS = ("update_state_after_alloc", "build_connector_meta")
LOADS = ("step", "async")
WHEN = ("before", "after")  # LMCache did its part
LENGTH, OTHER = 3 * CHUNK + 77, 2 * CHUNK + 30
SETTINGS = {"layers_at_once": None, "save_decode": False}


def connector(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector


def choose(engine: Engine, loads: str) -> None:
    """Let all loads be inside steps, or all requests wait for theirs."""
    from lmcache_xpu.kv_connector.load_policy import LoadPolicy
    from lmcache_xpu.transfer.tuning import tuning_of

    ours, policy = connector(engine), LoadPolicy(loads, tuning_of("cpu"))
    if hasattr(ours, "scheduler_side"):
        ours.scheduler_side._policy = policy
    else:
        ours._ways.allow_steps(policy)


def fail_once(owner: Any, hook: str, when: str, planted: list[str]) -> None:
    """Let the next call of LMCache's code for a hook raise."""
    call = getattr(owner, hook)

    def fault(*args: Any) -> None:
        setattr(owner, hook, call)
        if when == "after":
            call(*args)
        planted.append(hook)
        raise RuntimeError("planted")

    setattr(owner, hook, fault)


def look(engine: Engine, owner: Any, settle: Callable[[], Any]) -> dict[str, Any]:
    right = {}
    for length in LENGTH, OTHER:
        right[length] = engine.ask(prompt(length))
        settle()
    report = {}
    for loads in LOADS:
        choose(engine, loads)
        for hook in HOOKS:
            for when in WHEN:
                planted: list[str] = []
                engine.forget()
                fail_once(owner, hook, when, planted)
                answers = engine.ask_at_once([prompt(LENGTH), prompt(OTHER)])
                settle()
                engine.forget()
                before = engine.external_hits()
                again = engine.ask(prompt(LENGTH))
                settle()
                report[f"{loads} {hook} {when}"] = {
                    "planted": planted,
                    "right": answers == [right[LENGTH], right[OTHER]],
                    "right again": again == right[LENGTH],
                    "hit again": engine.external_hits() - before,
                }
    return report


def main(place: str, model: str, directory: Path) -> dict[str, Any]:
    if place == "in-process":
        engine = Engine(model, None, "standard", settings={**SETTINGS, "loads": "step"})
        adapter = connector(engine).scheduler_side._adapter
        return engine.close_after(look, adapter, lambda: None)
    server = CacheServer(directory / "server.log")
    server.start()
    try:
        settings = {**SETTINGS, "cache": "server", "server_url": server.url, "loads": "step"}
        engine = Engine(model, None, "standard", settings=settings)
        from lmcache_xpu.versions.lmcache_server import LMCacheMPConnector  # not before vLLM

        return engine.close_after(
            look, LMCacheMPConnector, lambda: wait_for(engine, busy, until=False)
        )
    finally:
        server.kill()


if __name__ == "__main__":
    place, model, directory = sys.argv[1:]
    end_with(lambda: main(place, model, Path(directory)))
