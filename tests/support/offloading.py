"""vLLM's tiering on real classes, without an engine: host memory, and a tier behind it."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

ROWS, CHUNK_BYTES = 64, 64 * 1024
OURS = {"type": "DiskTier", "module_path": "lmcache_xpu.offloading.tier"}
STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class Spec(OffloadingSpec):
    """What a tier is told of the engine."""

    def get_manager(self):
        raise NotImplementedError

    def get_worker(self, kv_caches):
        raise NotImplementedError


def spec(
    model: str = "some/model",
    dtype: str = "float16",
    layers: Sequence[str] = ("layer 0", "layer 1"),
    tokens_per_block: int = 16,
    tp_size: int = 1,
    engine: int = 0,
    layout: str | None = None,
) -> OffloadingSpec:
    group = OffloadingGroupConfig(tokens_per_block, tuple(layers), 0)
    parallel: dict[str, Any] = {
        **{"rank": 0, "world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "pcp_size": 1},
        **{"dcp_size": 1, "data_parallel_index": engine, "data_parallel_size": engine + 1},
        **{"data_parallel_rank_local": None, "is_parallelism_agnostic": False},
    }
    return Spec(
        OffloadingConfig(
            groups=(group,),
            worker_kv_bytes_per_block=CHUNK_BYTES // tp_size,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="test",
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(tokens_per_block, 1),
            parallel=OffloadingParallelConfig(**parallel),
            kv_cache_layout=layout,
        )
    )


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), group)


class Host:
    """Host memory with a tier behind it, driven as vLLM's manager drives them.

    Args:
        config: of the tier, as in `secondary_tiers`.
        told: what the tier is told of the engine.
        rows: of host memory.
        chunk_bytes: of one row.
    """

    def __init__(
        self,
        config: dict[str, Any],
        told: OffloadingSpec | None = None,
        rows: int = ROWS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        whole = mmap.mmap(-1, rows * chunk_bytes)  # in whole pages, as vLLM's
        self.memory = np.frombuffer(whole, np.int8).reshape(rows, chunk_bytes)
        self.tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
            dict(config), memoryview(self.memory), told or spec()
        )
        self.jobs = 0

    def request(self, name: str, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        context = ReqContext(name)
        for position, each in enumerate(keys):
            if hasattr(context, "set_offload_key_position"):
                context.set_offload_key_position(each, (position + 1) * 16)
        self.tier.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.tier.on_request_finished(context)
        self.tier.drain_jobs()

    def store(
        self, keys: Collection[OffloadKey], context: ReqContext, rows: Sequence[int] | None = None
    ) -> JobResult:
        return self._ask(self.tier.submit_store, keys, context, rows, is_promotion=False)

    def load(
        self, keys: Collection[OffloadKey], context: ReqContext, rows: Sequence[int] | None = None
    ) -> JobResult:
        return self._ask(self.tier.submit_load, keys, context, rows, is_promotion=True)

    def submit(self, call: Any, keys, context, rows, *, is_promotion: bool) -> int:
        self.jobs += 1
        places = np.array(rows if rows is not None else range(len(keys)), np.int32)
        call(TransferJob(self.jobs, list(keys), places, is_promotion, context))
        return self.jobs

    def _ask(self, call: Any, keys, context, rows, *, is_promotion: bool) -> JobResult:
        job = self.submit(call, keys, context, rows, is_promotion=is_promotion)
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == job
        return result

    def found(self, each: OffloadKey, context: ReqContext) -> str:
        """What the tier says of a chunk, once it has made up its mind (`fs` looks in a thread)."""
        for _ in range(500):
            result = self.tier.lookup(each, context)
            if result.name != "RETRY":
                return result.name
            self.tier.on_schedule_end(STEP_END)
            time.sleep(0.002)
        raise AssertionError("no answer in a second")

    def close(self) -> None:
        self.tier.shutdown()


def served(result: JobResult, keys: Collection[OffloadKey]) -> list[OffloadKey]:
    """The chunks that vLLM takes as loaded."""
    return list(keys) if result.success else list(result.successful_keys or ())


def ours(path: Path, gib: float = 1, **options: Any) -> dict[str, Any]:
    return {**OURS, "path": str(path), "gib": gib, **options}


def files(path: Path, suffix: str) -> list[Path]:
    return sorted(path.rglob(f"*{suffix}"))
