"""A real vLLM on CPU that is asked for what its connector tells of itself: events, stats, hits.

Run by engine/test_hooks.py, with the arguments ORDER MODEL DIRECTORY. By ORDER our connector is
alone, first in a MultiConnector, or behind another one there. Prints a JSON object last.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from support.probes import connector_options, end_with
from support.real_engine import BLOCK, CHUNK, digests, prompt, restored, zero

LONG, OTHER, LAST = 4 * CHUNK + 77, 3 * CHUNK + BLOCK + 5, 2 * CHUNK + 9
# Scheduler and worker in one process, as vLLM has them on devices other than the CPU.
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
POOL_GIB = 0.012  # 12 chunks: fewer than what is stored
FLOWS = [(d, t) for d in ("store", "load") for t in ("cpu", "disk")]


def counted(worker: Any = None) -> dict[str, float]:
    """The package's metrics as a process has them."""
    from prometheus_client import REGISTRY

    return {
        f"{name} {d} {t}": REGISTRY.get_sample_value(
            f"lmcache_xpu_{name}_total", {"direction": d, "tier": t}
        )
        or 0.0
        for name in ("bytes", "tokens", "seconds")
        for d, t in FLOWS
    }


def transfer_config(order: str, directory: Path) -> dict[str, Any]:
    connector = connector_options(
        {
            "model": "unused",
            "cpu_gib": POOL_GIB if order == "alone" else 0.25,
            "disk_path": directory / "disk",
            "kv_events": f"ipc://{directory}/events",
        }
    )
    if order == "alone":
        return connector
    ours = connector["kv_transfer_config"]
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "other")},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [ours, other] if order == "first" else [other, ours]
        },
    }
    return connector | {"kv_transfer_config": several}


class Subscriber(threading.Thread):
    """Hears what vLLM publishes, as a router does."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        super().__init__(daemon=True)
        self.heard: list[Any] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def run(self) -> None:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            _, _, payload = self._socket.recv_multipart()
            self.heard += decoder.decode(payload).events


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "KV Transfer metrics" in (line := record.getMessage()):
            self.lines.append(line)


class Engine:
    def __init__(self, order: str, model: str, directory: Path) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        config = transfer_config(order, directory)
        # Alone, the engine is in another process, as behind an API server.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(order == "alone"))
        self.llm = LLM(
            model,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=4096,
            max_num_batched_tokens=4096,  # the other connector can't do with parts of a prompt
            enforce_eager=True,
            distributed_executor_backend=EXECUTOR,
            kv_cache_memory_bytes=2**26,
            disable_log_stats=False,
            scheduler_cls=config.get("scheduler_cls"),
            kv_transfer_config=config["kv_transfer_config"],
            kv_events_config=KVEventsConfig(**config["kv_events_config"]),
        )
        self.events = Subscriber(config["kv_events_config"]["endpoint"])
        self.events.start()
        time.sleep(0.5)  # a subscription takes a moment

    def ask(self, tokens: list[int], salt: str | None = None) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        asked: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt is not None:
            asked["cache_salt"] = salt
        [answer] = self.llm.generate([asked], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(zero)

    def external_hits(self) -> int:
        named = {metric.name: metric for metric in self.llm.get_metrics()}
        return named["vllm:external_prefix_cache_hits"].value

    def visit(self, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
        """An answer with the engine's own cache empty, and what it left there."""
        self.forget()
        before = self.external_hits()
        answer = self.ask(tokens, salt)
        blocks = self.llm.collective_rpc(digests)[0]
        return {"answer": answer, "hit": self.external_hits() - before, "blocks": blocks}


def watch_order(seen: list[str]) -> None:
    """When blocks are protected, and when vLLM prepares a step, which may write them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from lmcache_xpu.connector.worker_half import WorkerHalf

    protect, update = WorkerHalf.begin_step, GPUModelRunner._update_states

    def protecting(self, metadata):
        seen.append("protected")
        protect(self, metadata)

    def updating(self, *args):
        seen.append("prepared")
        return update(self, *args)

    WorkerHalf.begin_step, GPUModelRunner._update_states = protecting, updating


def run(order: str, model: str, directory: Path) -> dict[str, Any]:
    import msgspec

    lines = Lines()
    seen: list[str] = []
    engine = Engine(order, model, directory)
    if order != "alone":
        watch_order(seen)
    logging.getLogger("vllm").addHandler(lines)
    visits = {
        "cold": engine.visit(prompt(LONG)),
        "salted": engine.visit(prompt(LONG), "s"),
        "hit": engine.visit(prompt(LONG)),
        "salted hit": engine.visit(prompt(LONG), "s"),
        "longer": engine.visit(prompt(LONG) + prompt(200)),
    }
    engine.forget()
    visits["longer cold"] = engine.visit(prompt(LONG) + prompt(200), "never seen")
    cold = visits["cold"]["blocks"]
    for visit in visits.values():
        visit["restored"] = restored(cold, visit.pop("blocks"))
    engine.ask(prompt(OTHER))
    time.sleep(1)  # the disk tier writes in the background; what it has done is told in a step
    engine.ask(prompt(LAST))
    engine.llm.llm_engine.do_log_stats()
    time.sleep(0.5)
    report = {
        "visits": visits,
        "events": msgspec.to_builtins(engine.events.heard),
        "lines": lines.lines,
        "counted": counted(),
        "counted by the worker": engine.llm.collective_rpc(counted)[0],
        "sources": {
            metric.labels["source"]: metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == "vllm:prompt_tokens_cached_by_source"
        },
        "steps": seen,
        "locks": engine.llm.collective_rpc(locks)[0],
    }
    engine.llm.llm_engine.engine_core.shutdown()  # its processes would hold on to the output
    return report


def locks(worker: Any) -> int:
    """Objects of the cache that are locked, also inside a MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_xpu.connector.connector import LMCacheXPUServerConnector

    group = get_kv_transfer_group()
    [ours] = [
        connector
        for connector in getattr(group, "sub_connectors", [group])
        if isinstance(connector, LMCacheXPUServerConnector)
    ]
    storage = ours.worker_half._client.local._storage
    return storage.report_status()["l1_manager"]["read_locked_count"]


if __name__ == "__main__":
    order, model, directory = sys.argv[1:]
    end_with(lambda: run(order, model, Path(directory)))
