"""A real vLLM on CPU with real LMCache, whose weights change while it runs, and which is reset.

Run by engine/test_resets.py, with the arguments STEP MODEL DISK REFERENCE. The step `reset` changes
weights and resets in every way; the step `restart` is a new process with the weights of the files;
the step `ranks` has two workers in processes of their own, and a server, whose log is beside the
disk's directory. Each prints a JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from support.scripts import threads_of_ranks

if sys.argv[1:2] == ["ranks"]:
    os.environ.update(threads_of_ranks(2))

from support.cache_server import CacheServer
from support.probes import end_with
from support.real_engine import CHUNK, Engine, prompt, sampling
from support.server_workers import busy, wait_for

LENGTHS = {
    "stored": 4 * CHUNK + 77,
    "poison": 3 * CHUNK + 50,
    "running": 4 * CHUNK + 5,
    "kept running": 4 * CHUNK + 6,  # a prompt of its own: it is not to wait for a load
}
CROWD = 28  # more than the engine's cache holds, of two ranks too
SALTS = itertools.count()


def change(worker):
    """New weights by hand, of which vLLM hears nothing."""
    for name, weight in worker.model_runner.model.named_parameters():
        if "layernorm" in name:
            weight.data.mul_(1.25).add_(0.05)


def local():
    from support.server_workers import half

    return half()._client.local


def disk_adapter():
    [(_, adapter)] = local()._storage.l2_adapters()
    return adapter


def stored(worker):
    """What the engine's tiers have: bytes in memory, and files."""
    from support.server_workers import half

    half().drain()
    wait(list(disk_adapter()._writes.pending.values()))
    return [local().memory_use()[0], len(list(disk_adapter()._store.directory.glob("*.lmxkv")))]


def leave_disk(worker):
    """Nothing but the disk tier has anything; it keeps the first that was stored under a key."""
    stored(worker)
    local()._storage.clear(force=True)


def pins(worker):
    return local()._storage.report_status()["l1_manager"]["read_locked_count"]


class Case:
    """Prompts that are asked again after each change."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = {name: prompt(length) for name, length in LENGTHS.items()}

    def recompute(self, name: str) -> list[int]:
        """With the weights of now: a salt of its own finds nothing, in no cache."""
        return self.engine.ask(self.tokens[name], cache_salt=f"recompute {next(SALTS)}")

    def ask(self, name: str) -> dict:
        """What LMCache had of a prompt, and whether its answer is as recomputed."""
        before = self.engine.external_hits()
        answer = self.engine.ask(self.tokens[name])
        hit = self.engine.external_hits() - before
        return {"hit": hit, "right": answer == self.recompute(name), "answer": answer}

    def twice(self, name: str = "stored") -> dict:
        """Asked, and asked again without vLLM's own cache."""
        report = {"first": self.ask(name)}
        wait_for(self.engine, busy, until=False)
        self.engine.forget()
        return report | {"again": self.ask(name)}

    def stored(self) -> list[list[int]]:
        return self.engine.llm.collective_rpc(stored)


def begin(engine: Engine, prompts: list[list[int]], steps: int) -> dict[str, list[int]]:
    """Requests that are under way; what each has answered so far."""
    said: dict[str, list[int]] = {f"running {number:03d}": [] for number in range(len(prompts))}
    for name, tokens in zip(said, prompts, strict=True):
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling())
    return advance(engine, said, steps)


def advance(engine: Engine, said: dict[str, list[int]], steps: int) -> dict[str, list[int]]:
    """Some steps further, or to the end."""
    for _ in range(steps):
        if not engine.llm.llm_engine.has_unfinished_requests():
            break
        for output in engine.llm.llm_engine.step():
            key = next(name for name in said if output.request_id.startswith(name))
            said[key] = list(output.outputs[0].token_ids)
    return said


def running(case: Case, name: str, *, preempt: bool) -> dict:
    """A reset with a request at work, whose weights change with it."""
    engine = case.engine
    engine.forget()
    said = begin(engine, [case.tokens[name]], steps=1)  # of three that its prompt takes
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    while not scheduler.running:  # the disk is asked first
        advance(engine, said, 1)
    engine.llm.collective_rpc(change)
    core = engine.llm.llm_engine
    reset = core.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)
    after = case.stored()
    advance(engine, said, 1000)
    engine.forget()
    report = {"reset": reset, "stored": after, "first": case.ask(name)}
    engine.forget()
    engine.llm.collective_rpc(leave_disk)
    return report | {"again": case.ask(name)}


def crowd(case: Case, change_weights: Callable[[], object]) -> dict:
    """Other weights while some are computed and others wait, to whom stored KV was promised."""
    engine = case.engine
    prompts = [prompt(9 * CHUNK // 2 + at) for at in range(CROWD)]
    engine.forget()
    engine.ask_at_once(prompts)
    engine.forget()
    hits = engine.external_hits()
    said, scheduler = begin(engine, prompts, steps=1), connector(engine).scheduler_half
    while not scheduler._lookups._lookups:  # until somebody waits
        assert engine.llm.llm_engine.has_unfinished_requests()
        advance(engine, said, 1)
    waiting = [name for name in said if any(r.startswith(name) for r in waits(engine))]
    hits_before = engine.external_hits() - hits
    change_weights()
    left = engine.llm.collective_rpc(pins)
    advance(engine, said, 1000)
    numbers = [list(said).index(name) for name in waiting]
    fresh = [engine.ask(prompts[at], cache_salt=f"crowd {next(SALTS)}") for at in numbers]
    return {
        "pins": left,
        "hit_before": hits_before,
        "hit_after": engine.external_hits() - hits - hits_before,
        "right": [said[name] == wanted for name, wanted in zip(waiting, fresh, strict=True)],
    }


def waits(engine: Engine) -> list[str]:
    core = engine.llm.llm_engine.engine_core.engine_core
    return [request.request_id for request in core.scheduler.waiting]


def connector(engine: Engine):
    """The scheduler's half."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector


def reset(engine: Engine, reference: Path) -> dict:
    case, llm = Case(engine), engine.llm
    core = llm.llm_engine.engine_core.engine_core
    report: dict = {"plain": case.twice()}
    first = {name: case.recompute(name) for name in LENGTHS}
    reference.write_text(json.dumps(first))

    llm.collective_rpc(change)
    # Stored under the name of the old weights: nobody can know, until the reset says so.
    engine.forget()
    case.ask("poison")
    report["before"] = case.stored()
    report["said"] = llm.reset_prefix_cache(reset_connector=True)
    report["after"] = case.stored()
    report["reset"] = case.twice()
    report["poison"] = case.ask("poison")

    llm.collective_rpc(change)
    core._reset_caches()
    report["reset caches"] = case.twice()

    # vLLM's own cache is stale and stays so: what it has of a prompt must not be stored.
    stale = case.ask("running")
    llm.collective_rpc("reload_weights")
    stale = case.ask("running")
    engine.forget()
    report["stale"] = {"before": stale, "after": case.ask("running")}
    report["reloaded"] = case.twice()
    report["first"] = report["reloaded"]["again"]["answer"] == first["stored"]

    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        report[f"sleep {level}"] = case.twice()
    core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()
    report["pause"] = case.twice()
    report["running"] = running(case, "running", preempt=True)
    report["kept running"] = running(case, "kept running", preempt=False)

    def change_and_reset() -> None:
        llm.collective_rpc(change)
        llm.llm_engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    report["crowd"] = crowd(case, change_and_reset)
    report["end"] = case.stored()
    return report


def restart(engine: Engine, reference: Path) -> dict:
    case, first = Case(engine), json.loads(reference.read_text())
    report: dict = {"left": case.stored()}
    for name, wanted in first.items():
        report[name] = case.ask(name)
        report[name]["first"] = report[name]["answer"] == wanted
    report["again"] = case.twice()
    return report


def ranks(engine: Engine) -> dict:
    case, llm = Case(engine), engine.llm
    report: dict = {"plain": case.twice()}
    llm.collective_rpc(change)
    report["said"] = llm.reset_prefix_cache(reset_connector=True)
    report["reset"] = case.twice()
    engine.forget()
    llm.collective_rpc("reload_weights")
    # The workers find nothing; the scheduler hears of it with the first step.
    report["reloaded"] = case.ask("stored")
    engine.forget()
    report["later"] = case.twice()
    return report


def main(step: str, model: str, disk: Path, reference: Path) -> dict:
    if step != "ranks":
        probe = {"reset": reset, "restart": restart}[step]
        return Engine(model, str(disk), "standard").close_after(probe, reference)
    server = CacheServer(disk.with_suffix(".log"))
    server.start()
    try:
        settings = {"cache": "server", "server_url": server.url, "loads": "auto"}
        engine = Engine(model, None, "standard", settings=settings, tensor_parallel_size=2)
        return engine.close_after(ranks)
    finally:
        server.kill()


if __name__ == "__main__":
    step, model, *paths = sys.argv[1:]
    end_with(lambda: main(step, model, *map(Path, paths)))
