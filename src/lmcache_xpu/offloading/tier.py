"""The disk tier as a secondary tier of vLLM's `TieringOffloadingSpec`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lmcache_xpu import versions
from lmcache_xpu.model.model_fingerprint import fingerprint
from lmcache_xpu.tiers import complain
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.disk.writer import BEHIND, FAILED

_DRAIN_SECONDS = 10.0
# For the threads that read: vLLM asks without a pause while all requests wait, and else each thread
# waits up to 5 ms for Python after each of its calls. A step of the engine is far longer.
_PAUSE_SECONDS = 1e-4
_QUEUED = 0.25  # of host memory; what waits for the disk can't be used for anything else


@dataclass(slots=True, eq=False)
class _Job:
    """One job of vLLM, in as many parts as threads work on it."""

    asked: TransferJob
    is_load: bool
    queued_bytes: int = 0  # of host memory that waits for a write
    # Of each, the chunks that were moved, and when it ended.
    parts: list[Future[tuple[list[OffloadKey], float]]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        return all(part.done() for part in self.parts)


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # untyped base
    """Chunks of vLLM's host memory in files: bounded, checksummed, there again after a restart.

    Runs in the scheduler's process, and holds the bytes of all ranks. No call but `drain_jobs` and
    `shutdown` waits for a file. A file that is damaged, or gone, is a miss.

    vLLM's host memory, `primary_kv_view`, has a row of bytes for each chunk. The `namespace` is
    part of every name: set it apart where engines of other settings share a path. Options are
    `path`, a directory, `gib`, the bound of all files, and `threads` that read, and as many that
    write (4).

    Raises SettingsError if an option is unknown or wrong, or the directory can't be used.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        namespace: str = "",
        **options: Any,
    ) -> None:
        # Not an option, but vLLM's own from 0.31 on.
        vllms = {name: options.pop(name) for name in ("backpressure_detector",) if name in options}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **vllms)
        self.locality = Locality.LOCAL
        rows, self._chunk_bytes = primary_kv_view.shape or (0, 0)
        self._memory = primary_kv_view.cast("B")
        self._most_queued = int(rows * self._chunk_bytes * _QUEUED)
        engine = offloading_spec.config.parallel.data_parallel_index
        named = {f"disk.{name}": value for name, value in options.items()}
        settings = DiskSettings.parse(named | {"disk.engine": engine})
        self._identity = engine_identity(offloading_spec, self._chunk_bytes, namespace)
        self._store = settings.open_store(f"kv-vllm-{engine}")
        self._threads = settings.threads
        self._readers = ThreadPoolExecutor(settings.threads, "disk-read")
        self._writers = ThreadPoolExecutor(settings.threads, "disk-write")
        self._jobs: list[_Job] = []  # that vLLM was not told of
        self._running: list[Future[Any]] = []  # parts of jobs, and touches
        # Chunks that could not be read: not asked for twice by one request, which would never end.
        self._failed: dict[str, set[bytes]] = {}
        self._last: dict[str, tuple[int, int]] = {}  # by request: time of use, chunks without place

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Give the request's chunks a time of use, and ask for newly computed chunks alone."""
        self._last[req_context.req_id] = self._store.now(1), 0
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from the index in memory, at once."""
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        return LookupResult.HIT if self._name(key) in self._store else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue the writes of a job; refuse it where too much of host memory waits already."""
        size = self._chunk_bytes * len(job_metadata.keys)
        queued = sum(job.queued_bytes for job in self._jobs if not job.has_ended)
        if queued and queued + size > self._most_queued:
            complain(BEHIND)
            self._jobs.append(_Job(job_metadata, False))
            return
        used = {key: self._used_ns(key, job_metadata.req_context) for key in job_metadata.keys}

        def write(key: OffloadKey, row: memoryview) -> bool:
            try:
                return self._store.put(self._name(key), "", row, used[key])
            except OSError as error:
                complain(FAILED, error)
                return False

        self._begin(_Job(job_metadata, False, size), self._writers, write)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the reads of a job."""
        store, name = self._store, self._name
        self._begin(
            _Job(job_metadata, True), self._readers, lambda key, row: store.read(name(key), row)
        )

    def get_finished_jobs(self) -> list[JobResult]:
        """Return what became of the jobs that ended since the last call."""
        if any(job.is_load and not job.has_ended for job in self._jobs):
            time.sleep(_PAUSE_SECONDS)
        ended = [job for job in self._jobs if job.has_ended]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._running = [each for each in self._running if not each.done()]
        return [self._result(job) for job in ended]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used, the first of a prompt last of all to be evicted."""
        names = [self._name(key) for key in keys]
        # Once the writes queued before it have begun.
        self._running.append(self._writers.submit(self._store.touch, names))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Mark all of a request's chunks as used, those too that host memory had."""
        self._failed.pop(req_context.req_id, None)
        self._last.pop(req_context.req_id, None)
        # vLLM hands its tiers no list of a request's chunks; 0.30 calls `touch` instead.
        places: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
        if places:
            self.touch(sorted(places, key=places.__getitem__), req_context)

    def drain_jobs(self) -> None:
        """Wait until no job is queued or under way."""
        wait(self._running)

    def shutdown(self) -> None:
        """End the queued writes, those not begun in 10 s dropped, and let go of the directory."""
        wait(self._running, _DRAIN_SECONDS)
        for pool in (self._writers, self._readers):
            pool.shutdown(cancel_futures=True)
        self._store.close()
        self._memory.release()

    def _begin(
        self, job: _Job, pool: ThreadPoolExecutor, move: Callable[[OffloadKey, memoryview], bool]
    ) -> None:
        """Move each of a job's chunks; one whose move returns False is not among the moved."""
        size, chunks = self._chunk_bytes, []
        for key, row in zip(job.asked.keys, map(int, job.asked.chunk_ids), strict=True):
            chunks.append((key, self._memory[row * size : row * size + size]))

        def run(part: list[tuple[OffloadKey, memoryview]]) -> tuple[list[OffloadKey], float]:
            return [key for key, row in part if move(key, row)], time.monotonic()

        shares = [chunks[at :: self._threads] for at in range(self._threads)]
        job.parts = [pool.submit(run, share) for share in shares if share]
        self._running += job.parts
        self._jobs.append(job)

    def _result(self, job: _Job) -> JobResult:
        asked, end = job.asked, job.begun
        arrived: set[OffloadKey] = set()
        for part in job.parts:
            if not part.cancelled() and part.exception() is None:
                keys, ended = part.result()
                arrived.update(keys)
                end = max(end, ended)
        moved, request = [key for key in asked.keys if key in arrived], asked.req_context.req_id
        if job.is_load and request in self._last:  # else it was aborted
            self._failed.setdefault(request, set()).update(set(asked.keys) - arrived)
        result = JobResult(
            asked.job_id,
            success=len(moved) == len(asked.keys),
            successful_keys=moved or None,
            transfer_time=end - job.begun,
        )
        if hasattr(result, "transfer_bytes"):
            result.transfer_bytes = len(moved) * self._chunk_bytes
        return result

    def _used_ns(self, key: OffloadKey, context: ReqContext) -> int:
        """Return a chunk's time of use: its request's, a nanosecond earlier for each place."""
        last, count = self._last.get(context.req_id) or (self._store.now(1), 0)
        self._last[context.req_id] = last, count + 1
        position = getattr(context, "get_offload_key_position", lambda key: None)(key)
        return last - (count if position is None else position)

    def _name(self, key: OffloadKey) -> str:
        return f"{self._identity}:{key.hex()}"


def engine_identity(spec: OffloadingSpec, chunk_bytes: int, namespace: str) -> str:
    """Return 24 digits of a hash: equal for engines that may read each other's chunks.

    vLLM's keys hold a hash of the tokens and the number of a KV cache group, and nothing of the
    model. This covers what vLLM's tier `fs` has in the names of its files, the weights, the order
    of the bytes in a block, and their number; and on CPU, whose kernels pack blocks in an order
    that may change with every version, vLLM's version.
    """
    # vLLM's own names: a field that a later version adds counts at once.
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.file_mapper import FileMapper

    device = current_platform.device_type
    files = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
    facts: dict[str, Any] = {
        **files.get_run_config(),
        "chunk_bytes": chunk_bytes,
        "device": device,
        "kv_cache_layout": getattr(spec.config, "kv_cache_layout", None),
        "namespace": namespace,
        "vllm": str(versions.installed().vllm) if device == "cpu" else None,
        "weights": _weights(spec.config.model.name),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _weights(model: str) -> str:
    """Return the fingerprint of a model's files, or of its commit where a hub has it."""
    if Path(model).exists():
        return fingerprint(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a repository's name: a file of one, for example
        config = None
    # .../snapshots/COMMIT/config.json
    commit = Path(config).parent.name if isinstance(config, str) else None
    return fingerprint(model, commit)
