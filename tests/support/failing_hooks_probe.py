"""A real vLLM on CPU, of whose scheduler's hooks one fails for a request.

Run by attacks/test_scheduler_hooks.py with the arguments PLACE MODEL DIRECTORY, where PLACE is
"in-process" or "server". Prints a JSON object last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.real_engine import CHUNK, Engine, prompt
from support.server_workers import busy, half, wait_for

HOOKS = ("update_state_after_alloc", "build_connector_meta")
LOADS = ("step", "async")
WHEN = ("before", "after")  # a part of the hook's work
LENGTH, OTHER = 3 * CHUNK + 77, 2 * CHUNK + 30
SETTINGS = {"save_decode": False}


def connector(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector


def choose(engine: Engine, loads: str) -> None:
    """Let all loads be inside steps, or all requests wait for theirs."""
    connector(engine).scheduler_half.policy.loads = loads


def parts(engine: Engine) -> dict[str, tuple[Any, str]]:
    """Of each hook an object and the name of its method, which does a part of the hook's work."""
    from lmcache_xpu.connector.tracked_request import TrackedRequest

    return {
        "update_state_after_alloc": (TrackedRequest, "allocated"),
        "build_connector_meta": (connector(engine).scheduler_half.policy, "begin_step"),
    }


def fail_once(engine: Engine, hook: str, when: str, planted: list[str]) -> None:
    """Let the next call of a part of a hook raise."""
    owner, name = parts(engine)[hook]
    call = getattr(owner, name)

    def fault(*args: Any, **options: Any) -> None:
        setattr(owner, name, call)
        if when == "after":
            call(*args, **options)
        planted.append(hook)
        raise RuntimeError("planted")

    setattr(owner, name, fault)


def look(engine: Engine) -> dict[str, Any]:
    def settle() -> None:
        wait_for(engine, busy, until=False)

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
                fail_once(engine, hook, when, planted)
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
    return {**report, "locks": engine.llm.collective_rpc(locks)[0]}


def locks(worker) -> int:
    """Chunks that somebody reads or writes, in a cache of this process."""
    if (local := half()._client.local) is None:
        return 0
    status = local._storage.report_status()["l1_manager"]
    return int(status["read_locked_count"] + status["write_locked_count"])


def main(place: str, model: str, directory: Path) -> dict[str, Any]:
    if place == "in-process":
        engine = Engine(model, None, "standard", settings={**SETTINGS, "loads": "step"})
        return engine.close_after(look)
    server = CacheServer(directory / "server.log")
    server.start()
    try:
        settings = {**SETTINGS, "cache": "server", "server_url": server.url, "loads": "step"}
        engine = Engine(model, None, "standard", settings=settings)
        return engine.close_after(look)
    finally:
        server.kill()


if __name__ == "__main__":
    place, model, directory = sys.argv[1:]
    end_with(lambda: main(place, model, Path(directory)))
