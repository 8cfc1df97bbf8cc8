from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)

class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: Any
    req_context: ReqContext

class JobResult:
    transfer_bytes: int | None
    def __init__(
        self,
        job_id: int,
        success: bool,
        successful_keys: Collection[OffloadKey] | None = None,
        transfer_time: float | None = None,
    ) -> None: ...

class SecondaryTierManager:
    locality: Any
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None: ...
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult: ...
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None: ...
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    def on_request_finished(self, req_context: ReqContext) -> None: ...
    def drain_jobs(self) -> None: ...
    def shutdown(self) -> None: ...
