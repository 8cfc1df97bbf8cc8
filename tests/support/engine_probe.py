"""A real vLLM on CPU with real LMCache in this process: what a hit writes, byte by byte.

Run by engine/test_engine.py, with the arguments STEP MODEL DISK REFERENCE MODE RUNNER LOADS. The
step `store` recomputes prompts, hits them in the CPU tier, and hits them again with planted faults;
the step `restart` is a new process that finds them on disk; the step `broken` has a disk tier that
can't be opened. Each prints a JSON object last. RUNNER is `default` or `newer` (newer_runner.py),
LOADS the setting of that name.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from support import newer_runner
from support.probes import end_with
from support.real_engine import BLOCK, CHUNK, KV_HEADS, LENGTHS, Engine, counts, hit, prompt

CROWD = 16  # prompts at once
NEW = [900, 77, 600, 1300]  # tokens behind a history: most are computed in several steps


def turn(length: int) -> list[int]:
    """A history that all turns share, and what is new."""
    return prompt(4 * CHUNK + 1)[:-1] + prompt(length)


def disk_hits(worker):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    return engine.storage_manager.storage_backends["disk"].counters.hits


def crowd(engine: Engine) -> dict:
    """More prompts at once than the engine's cache holds, some of them twice."""
    # Each needs one more block when it has answered a few tokens; there are none, so some are
    # preempted and loaded again.
    prompts = [prompt((6 + at % 8) * BLOCK - 6 - at // 8) for at in range(CROWD)]
    alone = []
    for tokens in prompts:
        engine.forget()
        alone.append(engine.ask(tokens))
    rounds = []
    for order in (1, -1):
        engine.forget()
        hits, preempted = engine.external_hits(), engine.counter("num_preemptions")
        asked = [*range(CROWD), *range(0, CROWD, 5)][::order]
        answers = engine.ask_at_once([prompts[number] for number in asked])
        rounds.append(
            {
                "right": [answers[at] == alone[number] for at, number in enumerate(asked)],
                "hit": engine.external_hits() - hits,
                "preempted": engine.counter("num_preemptions") - preempted,
            }
        )
    return {"tokens": sum(map(len, prompts)), "rounds": rounds}


def stumble(engine: Engine) -> dict:
    """Turns at once, some of whose loads fail; and what is found of them afterwards."""
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    prompts = [turn(length) for length in NEW]
    engine.forget()
    engine.ask(turn(0))  # what the turns load
    scatter, calls = TorchTransfer.scatter, []

    def stumbling(self, *args):
        calls.append(len(calls) % 5 == 0)
        if calls[-1]:
            raise RuntimeError("planted")
        scatter(self, *args)

    engine.forget()
    hits = engine.external_hits()
    TorchTransfer.scatter = stumbling
    failing = engine.ask_at_once(prompts)
    TorchTransfer.scatter = scatter
    hits = engine.external_hits() - hits
    afterwards, cold = [], []
    for tokens in prompts:
        engine.forget()
        afterwards.append(engine.ask(tokens))
        engine.forget()
        cold.append(engine.ask(tokens, cache_salt="somebody else's"))
    return {
        "failed": sum(calls),
        "hit": hits,
        "failing": failing,
        "afterwards": afterwards,
        "cold": cold,
    }


def what_runs(engine: Engine) -> dict:
    core = engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return {
        "runner": type(runner).__module__,
        "scheduler": type(core.scheduler).__name__,
        "ahead": core.batch_queue is not None,
    }


def pool(worker):
    """Bytes of LMCache's memory, and whether it asked PyTorch for them."""
    from lmcache.v1.platform.torch_ops.mem_alloc import _tensor_registry
    from lmcache_xpu.cache_engine.health import pool
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    memory = pool(get_kv_transfer_group()._lmcache_engine.lmcache_engine)
    return memory.untyped_storage().nbytes(), memory.data_ptr() in _tensor_registry


def watch_loads() -> list[str]:
    """When the loads of a step had begun."""
    from lmcache_xpu.kv_connector.load_queue import LoadQueue
    from lmcache_xpu.kv_connector.worker import WorkerSide

    began: list[str] = []
    load, step, prepared = WorkerSide.begin_load, WorkerSide.begin_step, WorkerSide.start_load
    begin = LoadQueue.begin

    def begin_load(self, *args):
        if done := load(self, *args):
            began.append("scheduled")
        return done

    def begin_step(self, *args):
        begun = step(self, *args)
        if self._loads.begun:
            began.append("told")
        return begun

    def begin_waiting(self, requests):
        began.extend("waiting" for _ in requests)
        begin(self, requests)

    def start_load(self, *args):
        if self._loads.count and not self._loads.begun:
            began.append("prepared")
        prepared(self, *args)

    LoadQueue.begin = begin_waiting
    WorkerSide.begin_load, WorkerSide.begin_step = begin_load, begin_step
    WorkerSide.start_load = start_load
    return began


def watch_lookups() -> list[str]:
    """How the worker was asked: by a call, or through LMCache's socket as well."""
    from lmcache_xpu.cache_engine.lookup_client import NearTransport

    from lmcache_xpu.versions.lmcache import in_process_module

    far = in_process_module("v1.rpc.zmq_transport").ZmqReqRepClientTransport

    asked: list[str] = []

    def watch(kind: type, name: str) -> None:
        send = kind.send_and_recv_all

        def seen(self, message):
            asked.append(name)
            return send(self, message)

        kind.send_and_recv_all = seen

    watch(NearTransport, "near")
    watch(far, "far")
    return asked


def store(engine: Engine, reference: Path) -> dict:
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    asked, began = watch_lookups(), watch_loads()
    report: dict = {}
    for name, length in LENGTHS.items():
        engine.forget()
        answer = engine.ask(prompt(length))
        report[name] = {"recompute": answer, "cold": engine.blocks()}
    reference.write_text(json.dumps(report))
    for name, length in LENGTHS.items():
        report[name]["cpu"] = hit(engine, prompt(length), report[name]["cold"])

    scatter = TorchTransfer.scatter

    def shifted(self, rows, source, first_layer=0):
        # One block further: opaque blocks are rows.
        scatter(self, rows._replace(engine=rows.engine + 1), source, first_layer)

    def without_values(self, rows, source, first_layer=0):
        source = source.clone()
        # A block of vLLM's CPU attention: per head the keys of all its tokens, then the values.
        source.unflatten(-1, (KV_HEADS, 2, -1))[..., 1, :].zero_()
        scatter(self, rows, source, first_layer)

    for fault, broken in (("shifted", shifted), ("without values", without_values)):
        TorchTransfer.scatter = broken
        for name, length in LENGTHS.items():
            report[name][fault] = hit(engine, prompt(length), report[name]["cold"])

    def failing(self, rows, source, first_layer=0):
        raise RuntimeError("planted")

    TorchTransfer.scatter = failing
    for name, length in LENGTHS.items():
        report[name]["failing"] = hit(engine, prompt(length), report[name]["cold"])
    TorchTransfer.scatter = scatter
    prompts = {name: {k: v for k, v in f.items() if k != "cold"} for name, f in report.items()}
    return {
        "began": list(began),  # before the others, whose loads nobody counts
        "runs": what_runs(engine),
        "prompts": prompts,
        "stumbled": stumble(engine),
        "asked": sorted(set(asked)),
        "crowd": crowd(engine),
        "counts": engine.llm.collective_rpc(counts)[0],
        "pool": engine.llm.collective_rpc(pool)[0],
    }


def restart(engine: Engine, reference: Path) -> dict:
    cold = json.loads(reference.read_text())
    report = {name: hit(engine, prompt(n), cold[name]["cold"]) for name, n in LENGTHS.items()}
    return {
        "prompts": report,
        "again": {name: hit(engine, prompt(n), cold[name]["cold"]) for name, n in LENGTHS.items()},
        "disk_hits": engine.llm.collective_rpc(disk_hits)[0],
        "counts": engine.llm.collective_rpc(counts)[0],
    }


if __name__ == "__main__":
    step, model, disk, reference, mode, runner, loads = sys.argv[1:]
    settings = {"loads": loads}
    if runner == "newer":
        newer_runner.use()
    if step == "broken":  # which is to end by itself
        Engine(model, "/dev/null/no-directory", mode, settings=settings)
    probe = {"store": store, "restart": restart}[step]
    engine = functools.partial(Engine, model, disk, mode, settings=settings)
    end_with(lambda: engine().close_after(probe, Path(reference)))
