"""The disk tier as a secondary tier of vLLM's `TieringOffloadingSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.offloading.identity import engine_identity
from lmcache_xpu.offloading.transfers import Transfer, Transfers
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.pause import Complaint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["DiskTier"]

_OPTIONS = ("path", "gib", "threads")
_DRAIN_SECONDS = 10.0
_QUEUED = 0.25  # of host memory; what waits for the disk can't be used for anything else


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # untyped base
    """Chunks of vLLM's host memory in files: bounded, checksummed, there again after a restart.

    Runs in the scheduler's process, and holds the bytes of all ranks. No call but `drain_jobs` and
    `shutdown` waits for a file. A file that is damaged, or gone, is a miss.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: vLLM's host memory, one row of bytes for each chunk.
        tier_type: vLLM's name of this tier.
        namespace: part of every name; set it apart where engines of other settings share a path.
        options: `path`, a directory; `gib`, the bound of all files; `threads` that read, and as
            many that write (4). From vLLM 0.31 on also vLLM's `backpressure_detector`.

    Raises:
        SettingsError: an option is unknown or wrong, or the directory can't be used.
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
        mine = {name: options.pop(name) for name in _OPTIONS if name in options}
        if unknown := sorted(options.keys() - {"backpressure_detector"}):
            raise SettingsError(
                f"{', '.join(unknown)} in secondary_tiers", f"of {', '.join(_OPTIONS)}, namespace"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, **options)
        self.locality = Locality.LOCAL
        rows, self._chunk_bytes = primary_kv_view.shape or (0, 0)
        self._memory = primary_kv_view.cast("B")
        self._most_queued = int(rows * self._chunk_bytes * _QUEUED)
        engine = offloading_spec.config.parallel.data_parallel_index
        settings = DiskSettings.parse({"disk.engine": engine} | _named(mine))
        self._identity = engine_identity(offloading_spec, self._chunk_bytes, namespace)
        self._store = settings.open_offloading_store()
        self._transfers = Transfers(settings.threads)
        # Chunks that could not be read: not asked for twice by one request, which would never end.
        self._failed: dict[str, set[bytes]] = {}
        self._last: dict[str, tuple[int, int]] = {}  # by request: time of use, chunks without place
        self._behind = Complaint(
            "the disk is slower than the engine; not everything is stored "
            "(docs: troubleshooting#disk-behind)"
        )
        self._dropped = Complaint(
            "a chunk could not be stored and was dropped (%s); if the disk is full, free space "
            "or make gib smaller (docs: troubleshooting#disk-not-stored)"
        )

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
        transfer = _transfer(job_metadata, is_load=False)
        size = self._chunk_bytes * len(transfer.keys)
        queued = self._transfers.queued_bytes
        if queued and queued + size > self._most_queued:
            self._behind.log()
            self._transfers.refuse(transfer)
            return
        rows = [self._row(chunk) for chunk in job_metadata.chunk_ids]
        used = [self._used_ns(key, job_metadata.req_context) for key in job_metadata.keys]

        def write(place: int) -> bool:
            name = self._name(transfer.keys[place])
            try:
                return self._store.put(name, "", rows[place], used[place])
            except OSError as error:
                self._dropped.log(error)
                return False

        self._transfers.begin(transfer, write, self._chunk_bytes)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue the reads of a job."""
        transfer = _transfer(job_metadata, is_load=True)
        rows = [self._row(chunk) for chunk in job_metadata.chunk_ids]

        def read(place: int) -> bool:
            return self._store.read(self._name(transfer.keys[place]), rows[place])

        self._transfers.begin(transfer, read, self._chunk_bytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what became of the jobs that ended since the last call."""
        return [self._result(transfer) for transfer in self._transfers.ended()]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used, the first of a prompt last of all to be evicted."""
        names = [self._name(key) for key in keys]
        self._transfers.after_writes(lambda: self._store.touch(names))

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
        self._transfers.drain()

    def shutdown(self) -> None:
        """End the queued writes, those not begun in 10 s dropped, and let go of the directory."""
        self._transfers.close(_DRAIN_SECONDS)
        self._store.close()
        self._memory.release()

    def _result(self, transfer: Transfer) -> JobResult:
        moved = [key for key in transfer.keys if key in transfer.moved]
        if transfer.is_load and transfer.request in self._last:  # else it was aborted
            failed = self._failed.setdefault(transfer.request, set())
            failed.update(key for key in transfer.keys if key not in transfer.moved)
        result = JobResult(
            transfer.job_id,
            success=len(moved) == len(transfer.keys),
            successful_keys=moved or None,
            transfer_time=transfer.seconds,
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

    def _row(self, chunk: int) -> memoryview:
        begin = int(chunk) * self._chunk_bytes
        return self._memory[begin : begin + self._chunk_bytes]


def _transfer(job: TransferJob, *, is_load: bool) -> Transfer:
    return Transfer(job.job_id, job.req_context.req_id, list(job.keys), is_load)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    return {f"disk.{name}": value for name, value in options.items()}
