"""A real vLLM on CPU with LMCache's server, byte by byte, also when the server fails.

Run by engine/test_server.py with the arguments STEP MODEL DIRECTORY [URL]; prints a JSON object
last.

    faults   one engine: hits, salts, a reset, and a server that is killed, hung, or damaged
    store    at a server's URL: what is stored for another engine
    find     another engine, which finds it
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.real_engine import CHUNK, LENGTHS, Engine, hit, prompt

HIT = "inside"  # of the lengths
COMES_BACK_S = 20
REFUSED = "lmcache_mp_l1_allocation_failure_chunks_total"


def adapter():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_adapter


def busy(worker) -> bool:
    return adapter().transfers.busy


def answers(worker) -> bool:
    """Whether the server does, as far as the worker knows."""
    return adapter()._health_event.is_set()


def damage(worker) -> None:
    """Overwrite all of the server's memory."""
    adapter().transfers._server.lent.pool.fill_(7)


def on_next(worker, direction: str, act: Callable[[], None]) -> None:
    """Do something once, in the middle of the next store or load of a worker."""
    [copies] = adapter().transfers.groups
    move = getattr(copies, direction)

    def fault(*args: Any) -> Any:
        delattr(copies, direction)
        half = max(1, len(args[0]) // 2)
        move(*(part[:half] for part in args))
        act()
        return move(*args)

    setattr(copies, direction, fault)


def counted(worker) -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        f"{sample.labels['direction']} {sample.labels['reason']}": sample.value
        for metric in REGISTRY.collect()
        if metric.name == "lmcache_xpu_errors"
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["tier"] == "server" and sample.value
    }


def wait_for(engine: Engine, look: Callable[[Any], bool], *, until: bool) -> bool:
    """Wait until every worker sees it so; whether that came within 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if set(engine.llm.collective_rpc(look)) == {until}:
            return True
        time.sleep(0.05)
    return False


def make(model: str, url: str, **options: Any) -> Engine:
    settings = {"cache": "server", "server_url": url, "layers_at_once": None}
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


def faults(engine: Engine, server: CacheServer) -> dict[str, Any]:
    from support.other_server import OtherServer

    filled = full(engine, server)
    references = {name: cold(engine, length) for name, length in LENGTHS.items()}
    report: dict[str, Any] = {
        "full": filled,
        "first": {name: facts["hit"] for name, facts in references.items()},
        "hits": {n: asked(engine, references[n], LENGTHS[n]) for n in LENGTHS},
        "salts": [salted(engine, salt) for salt in ("a", "a", "b")],
        "errors before": engine.llm.collective_rpc(counted)[0],
    }
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
            if second["hit"] or not second["same"]:
                break
        return {"seen": seen, "first": first, "second": second}

    server.hang()
    report["hung"] = [ask() for _ in range(2)]
    report["goes on"] = comes_back(server.go_on)
    server.kill()
    report["killed"] = [ask() for _ in range(2)]
    with OtherServer(server.url) as other:
        for number in range(4):
            heard = other.asked.count("ping") + 4  # of both halves
            while other.asked.count("ping") < heard:
                time.sleep(0.05)
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
    report["aborted"] = aborted(engine, LENGTHS["block"])
    report["after aborts"] = asked(engine, references["block"], LENGTHS["block"])
    engine.llm.reset_prefix_cache(reset_connector=True)
    report["reset"] = asked(engine, references["block"], LENGTHS["block"])
    wait_for(engine, busy, until=False)
    report["after the reset"] = asked(engine, references["block"], LENGTHS["block"])
    report["errors"] = engine.llm.collective_rpc(counted)[0]
    return report


def aborted(engine: Engine, length: int) -> dict[str, Any]:
    """Abort requests before, in and after their loads; how many loads were on their way."""
    from vllm import SamplingParams

    engine.forget()
    llm, loading = engine.llm.llm_engine, 0
    engine.llm.collective_rpc(on_next, args=("load", lambda: time.sleep(0.3)))
    for steps in (0, 1, 2, 3, 4, 8, 16, 100):
        llm.add_request(
            f"aborted-{steps}", {"prompt_token_ids": prompt(length)}, SamplingParams(max_tokens=24)
        )
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
    return adapter().transfers._loads.busy


def store(engine: Engine, directory: Path) -> dict[str, Any]:
    references = {name: cold(engine, length) for name, length in LENGTHS.items()}
    (directory / "reference.json").write_text(json.dumps(references))
    return {name: facts["hit"] for name, facts in references.items()}


def find(engine: Engine, directory: Path) -> dict[str, Any]:
    references = json.loads((directory / "reference.json").read_text())
    return {name: asked(engine, references[name], length) for name, length in LENGTHS.items()}


def main(step: str, model: str, directory: Path, url: str) -> dict[str, Any]:
    if step == "faults":
        server = CacheServer(directory / "server.log")
        server.start()
        try:
            return make(model, server.url).close_after(faults, server)
        finally:
            server.kill()
    return make(model, url).close_after({"store": store, "find": find}[step], directory)


if __name__ == "__main__":
    step, model, directory, *url = sys.argv[1:]
    end_with(lambda: main(step, model, Path(directory), *(url or [""])))
