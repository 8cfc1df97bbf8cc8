"""A real vLLM on CPU with LMCache's own engine in this process: what a hit writes, byte by byte.

Run by engine/test_stock.py, with the arguments STEP MODEL DISK REFERENCE MODE RUNNER. The step
`store` recomputes prompts, hits them in the CPU tier, and hits them again with planted faults; the
step `restart` is a new process that finds them on disk, also when parts of them are in the CPU
tier; the step `stop` changes the weights, or resets the cache; the step `broken` has a disk tier
that can't be opened. Each prints a JSON object last. RUNNER is `default` or `newer`
(newer_runner.py).
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from support import newer_runner
from support.probes import end_with
from support.real_engine import BLOCK, CHUNK, KV_HEADS, LENGTHS, Engine, counts, hit, prompt

CROWD = 16  # prompts at once
NEW = [900, 77, 600, 1300]  # tokens behind a history: most are computed in several steps


def turn(length: int) -> list[int]:
    """A history that all turns share, and what is new."""
    return prompt(4 * CHUNK + 1)[:-1] + prompt(length)


def lmcache_engine() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._lmcache_engine.lmcache_engine


def disk_hits(worker):
    return lmcache_engine().storage_manager.storage_backends["disk"]._store.counters["hits"]


def chunks(worker):
    """Chunks, or their layers, in the CPU tier."""
    return len(lmcache_engine().storage_manager.storage_backends["LocalCPUBackend"].hot_cache)


def forget_some(worker):
    """Let the CPU tier forget the beginnings of prompts; the disk has them."""
    tier = lmcache_engine().storage_manager.storage_backends["LocalCPUBackend"]
    keys = list(tier.hot_cache)
    for key in keys[: len(keys) // 2]:
        tier.remove(key)
    return len(keys)


def pool(worker):
    """Bytes of LMCache's memory, and whether it asked PyTorch for them."""
    from lmcache.v1.platform.torch_ops.mem_alloc import _tensor_registry

    tier = lmcache_engine().storage_manager.storage_backends["LocalCPUBackend"]
    memory = tier.memory_allocator.buffer
    return memory.untyped_storage().nbytes(), memory.data_ptr() in _tensor_registry


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


def salts(engine: Engine) -> dict:
    """A prompt that LMCache has, asked with a salt; and one that it gets with a salt alone."""
    tokens, other = prompt(LENGTHS["inside"]), prompt(5 * CHUNK)
    engine.forget()
    hits = engine.external_hits()
    engine.ask(tokens, cache_salt="a client's own")
    before = engine.llm.collective_rpc(chunks)[0]
    engine.ask(other, cache_salt="a client's own")
    stored = engine.llm.collective_rpc(chunks)[0] - before
    engine.forget()
    engine.ask(other)
    return {"hit": engine.external_hits() - hits, "stored": stored}


def what_runs(engine: Engine) -> dict:
    core = engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return {
        "connector": type(core.scheduler.connector).__name__,
        "runner": type(runner).__module__,
        "ahead": core.batch_queue is not None,
    }


def store(engine: Engine, reference: Path) -> dict:
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

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
        "runs": what_runs(engine),
        "prompts": prompts,
        "stumbled": stumble(engine),
        "crowd": crowd(engine),
        "salts": salts(engine),
        "counts": engine.llm.collective_rpc(counts)[0],
        "pool": engine.llm.collective_rpc(pool)[0],
    }


def restart(engine: Engine, reference: Path) -> dict:
    cold = json.loads(reference.read_text())

    def turns() -> dict:
        return {name: hit(engine, prompt(n), cold[name]["cold"]) for name, n in LENGTHS.items()}

    report = {"prompts": turns(), "again": turns()}
    report["disk_hits"] = engine.llm.collective_rpc(disk_hits)[0]
    new = [prompt(LENGTHS[name]) + prompt(3 * CHUNK) for name in LENGTHS]
    for tokens in new:  # the disk has the beginning, the CPU tier the rest as well
        engine.ask(tokens)
    report["forgot"] = engine.llm.collective_rpc(forget_some)[0]
    scattered = []
    for tokens in new:
        engine.forget()
        once = engine.ask(tokens)
        engine.forget()
        hits = engine.external_hits()
        twice = engine.ask(tokens)
        hits = engine.external_hits() - hits
        engine.forget()
        scattered.append([once, twice, engine.ask(tokens, cache_salt="another"), hits])
    report["scattered"] = scattered
    report["counts"] = engine.llm.collective_rpc(counts)[0]
    return report


def other_weights(worker):
    """Weights from which other keys and values follow."""
    for name, parameter in worker.model_runner.model.named_parameters():
        if "layernorm" in name:  # others are repacked on CPU
            parameter.data.mul_(1.25).add_(0.05)


def stop(engine: Engine, change: str) -> dict:
    tokens, other = prompt(LENGTHS["inside"]), prompt(LENGTHS["block"])
    old = engine.ask(tokens)
    engine.forget()
    hits = engine.external_hits()
    engine.ask(tokens)
    before = engine.external_hits() - hits
    if change == "weights":
        engine.llm.collective_rpc("reload_weights")
        engine.llm.collective_rpc(other_weights)
        engine.forget()
    else:
        engine.llm.reset_prefix_cache(reset_connector=True)
    stored, hits = engine.llm.collective_rpc(chunks)[0], engine.external_hits()
    answers = []
    for asked in (tokens, other):
        for salt in ({}, {"cache_salt": "a client's own"}):
            engine.forget()
            answers.append(engine.ask(asked, **salt))
    return {
        "before": before,
        "hit": engine.external_hits() - hits,
        "stored": engine.llm.collective_rpc(chunks)[0] - stored,
        "right": [answers[0] == answers[1], answers[2] == answers[3]],
        "changed": answers[0] != old,
    }


if __name__ == "__main__":
    step, model, disk, reference, mode, runner = sys.argv[1:]
    if runner == "newer":
        newer_runner.use()
    if step == "broken":  # which is to end by itself
        Engine(model, "/dev/null/no-directory", mode)
    engine = functools.partial(Engine, model, None if disk == "none" else disk, mode)
    if step == "stop":
        end_with(lambda: engine().close_after(stop, reference))
    probe = {"store": store, "restart": restart}[step]
    end_with(lambda: engine().close_after(probe, Path(reference)))
