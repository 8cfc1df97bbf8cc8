"""A real vLLM on CPU with real LMCache in this process: what a hit writes, byte by byte.

Run by engine/test_engine.py, with the arguments STEP MODEL DISK REFERENCE MODE RUNNER. The step
`store` recomputes prompts, hits them in the CPU tier, and hits them again with planted faults; the
step `restart` is a new process that finds them on disk; the step `broken` has a disk tier that
can't be opened. Each prints a JSON object last. RUNNER is `default` or `newer` (newer_runner.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import newer_runner
from support.probes import connector_options, end_with

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: faults can be planted
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    TOKENIZERS_PARALLELISM="false",
)

CHUNK, BLOCK, KV_HEADS = 256, 128, 2
# On a chunk's boundary, inside a block, and on a block's boundary inside a chunk.
LENGTHS = {"boundary": 4 * CHUNK, "inside": 4 * CHUNK + 77, "block": 3 * CHUNK + BLOCK}
CROWD = 16  # prompts at once
NEW = [900, 77, 600, 1300]  # tokens behind a history: most are computed in several steps


def prompt(length: int) -> list[int]:
    chosen = random.Random(length)
    return [chosen.randrange(300, 4000) for _ in range(length)]


def cached(name: str) -> int:
    """Tokens that a hit may restore: whole chunks, and never the last token of a prompt."""
    whole = LENGTHS[name] // CHUNK * CHUNK
    return whole - 1 if whole == LENGTHS[name] else whole


def turn(length: int) -> list[int]:
    """A history that all turns share, and what is new."""
    return prompt(4 * CHUNK + 1)[:-1] + prompt(length)


def caches(worker):
    return list(worker.model_runner.kv_caches)


def zero(worker):
    for cache in caches(worker):
        cache.zero_()


def digests(worker):
    """Per layer, the digests of the blocks that hold anything."""
    return [
        [hashlib.sha256(b.contiguous().numpy().tobytes()).hexdigest() for b in cache if b.any()]
        for cache in caches(worker)
    ]


def disk_hits(worker):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    return engine.storage_manager.storage_backends["disk"].counters.hits


class Engine:
    """The engine and what is asked of it."""

    def __init__(
        self,
        model: str,
        disk: str,
        mode: str,
        *,
        layers_at_once: int = 3,
        lmcache: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        from lmcache_xpu.cache_engine import health

        if mode == "layerwise":  # the memory of a pool that is too large to be pinned
            health.most_pinned = lambda device: 2**20
        connector = connector_options(
            {
                "model": model,
                "cpu_gib": 0.25,
                "disk_path": disk,
                "layerwise": mode == "layerwise",
                "layers_at_once": layers_at_once,
                "save_decode": True,  # a preempted request's hit reaches into its answer
            }
        )
        connector["kv_transfer_config"]["kv_connector_extra_config"] |= lmcache or {}
        usual = {
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,  # chunked prefill: stores and loads in several steps
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
            "disable_log_stats": False,
            **connector,
        }
        self.llm = LLM(model, **{**usual, **options})

    def ask(self, tokens: list[int], **options: Any) -> list[int]:
        return self.ask_at_once([tokens], **options)[0]

    def ask_at_once(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        asked = [{"prompt_token_ids": tokens, **options} for tokens in prompts]
        answers = self.llm.generate(asked, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def forget(self) -> None:
        """Empty the engine's own cache: not only its index, its bytes too."""
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(zero)

    def blocks(self) -> list[list[str]]:
        return self.llm.collective_rpc(digests)[0]

    def counter(self, name: str) -> int:
        named = {metric.name: metric for metric in self.llm.get_metrics()}
        return named[f"vllm:{name}"].value

    def close_after(self, look: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Return what a function finds with this engine and arguments, and shut the engine down."""
        result = look(self, *args)
        self.llm.llm_engine.engine_core.shutdown()
        return result

    def external_hits(self) -> int:
        return self.counter("external_prefix_cache_hits")


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


def restored(cold: list[list[str]], warm: list[list[str]]) -> int:
    """Blocks that are byte for byte the same, in the layer that has the fewest."""
    return min(len(set(a) & set(b)) for a, b in zip(cold, warm, strict=True))


def hit(engine: Engine, tokens: list[int], cold: list[list[str]]) -> dict:
    engine.forget()
    before = engine.external_hits()
    answer = engine.ask(tokens)
    return {
        "answer": answer,
        "hit": engine.external_hits() - before,
        "restored": restored(cold, engine.blocks()),
    }


def counts(worker):
    """LMCache's references and pins that outlive a request."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    objs = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache.values()
    facts = [obj.metadata for obj in objs]
    return sorted({(fact.ref_count, fact.pin_count) for fact in facts})


def pool(worker):
    """Bytes of LMCache's memory, and whether it asked PyTorch for them."""
    from lmcache.v1.platform.torch_ops.mem_alloc import _tensor_registry
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_xpu.cache_engine.health import pool

    memory = pool(get_kv_transfer_group()._lmcache_engine.lmcache_engine)
    return memory.untyped_storage().nbytes(), memory.data_ptr() in _tensor_registry


def watch_loads() -> list[str]:
    """When the loads of a step had begun."""
    from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector as Connector

    began: list[str] = []
    load, step, prepared = Connector.begin_load, Connector.begin_step, Connector.start_load_kv

    def begin_load(self, *args):
        if done := load(self, *args):
            began.append("scheduled")
        return done

    def begin_step(self, *args):
        step(self, *args)
        if self._loading:
            began.append("told")

    def start_load_kv(self, *args, **kwargs):
        if self._loads_in_step() and not self._loading:
            began.append("prepared")
        prepared(self, *args, **kwargs)

    Connector.begin_load, Connector.begin_step = begin_load, begin_step
    Connector.start_load_kv = start_load_kv
    return began


def watch_lookups() -> list[str]:
    """How the worker was asked: by a call, or through LMCache's socket."""
    from lmcache.v1.rpc.zmq_transport import ZmqReqRepClientTransport as Far

    from lmcache_xpu.cache_engine.near_lookups import NearLookups as Near

    asked: list[str] = []

    def watch(kind: type, name: str) -> None:
        send = kind.send_and_recv_all

        def seen(self, message):
            asked.append(name)
            return send(self, message)

        kind.send_and_recv_all = seen

    watch(Near, "near")
    watch(Far, "far")
    return asked


def store(engine: Engine, reference: Path) -> dict:
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    asked, began = watch_lookups(), watch_loads()
    found: dict = {}
    for name, length in LENGTHS.items():
        engine.forget()
        answer = engine.ask(prompt(length))
        found[name] = {"recompute": answer, "cold": engine.blocks()}
    reference.write_text(json.dumps(found))
    for name, length in LENGTHS.items():
        found[name]["cpu"] = hit(engine, prompt(length), found[name]["cold"])

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
            found[name][fault] = hit(engine, prompt(length), found[name]["cold"])

    def failing(self, rows, source, first_layer=0):
        raise RuntimeError("planted")

    TorchTransfer.scatter = failing
    for name, length in LENGTHS.items():
        found[name]["failing"] = hit(engine, prompt(length), found[name]["cold"])
    TorchTransfer.scatter = scatter
    prompts = {name: {k: v for k, v in f.items() if k != "cold"} for name, f in found.items()}
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
    found = {name: hit(engine, prompt(n), cold[name]["cold"]) for name, n in LENGTHS.items()}
    return {
        "prompts": found,
        "again": {name: hit(engine, prompt(n), cold[name]["cold"]) for name, n in LENGTHS.items()},
        "disk_hits": engine.llm.collective_rpc(disk_hits)[0],
        "counts": engine.llm.collective_rpc(counts)[0],
    }


if __name__ == "__main__":
    step, model, disk, reference, mode, runner = sys.argv[1:]
    if runner == "newer":
        newer_runner.use()
    if step == "broken":  # which is to end by itself
        Engine(model, "/dev/null/no-directory", mode)
    probe = {"store": store, "restart": restart}[step]
    end_with(lambda: Engine(model, disk, mode).close_after(probe, Path(reference)))
