"""A worker for vLLM's tiering that copies in plain PyTorch: vLLM's own refuses CPU engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PlainSpec(TieringOffloadingSpec):
    """vLLM's spec, with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = PlainWorker(kv_caches, region)
        return self._worker


class PlainWorker(OffloadingWorker):
    """Copies when it is asked, one block for each chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._caches, self._region = kv_caches, region
        pages = [each.page_size_bytes for each in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(page) for page in pages]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, block, chunk in self._pairs(src_spec, dst_spec):
            page = self._caches.tensors[tensor].tensor[block]
            self._rows[tensor][chunk].copy_(page.reshape(-1))
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False):
        for tensor, block, chunk in self._pairs(dst_spec, src_spec):
            page = self._caches.tensors[tensor].tensor[block]
            page.copy_(self._rows[tensor][chunk].view_as(page))
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, True))
        return True

    def _pairs(self, device: Any, host: Any) -> Iterator[tuple[int, int, int]]:
        """Each tensor of a block's group, the block, and its chunk in host memory."""
        at = 0
        for group, size in enumerate(device.group_sizes):
            tensors = {ref.tensor_idx for ref in self._caches.group_data_refs[group]}
            for place in range(at, at + size):
                for tensor in tensors:
                    yield tensor, int(device.block_ids[place]), int(host.block_ids[place])
            at += size
