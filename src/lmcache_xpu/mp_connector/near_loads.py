"""Loads that begin before a worker hears of their step, by a scheduler in its process.

    name    while the server looks a request up: its chunks and their seals
    ask     it has a hit: where its chunks are
    begin   vLLM has decided on the step: the first layers are enqueued

vLLM's newer runner tells its worker of a step when it has prepared that. On two hosts of an H200
this was 23 ms after the look-up of 65,536 tokens, in which the link was idle.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_xpu.kv_connector.near_worker import near_connector
from lmcache_xpu.mp_connector.step import Step
from lmcache_xpu.mp_connector.worker_half import WorkerHalf
from lmcache_xpu.versions.lmcache_server import LMCacheMPRequestMetadata, LMCacheMPRequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["NearLoads"]


class NearLoads:
    """The loads of one scheduler's requests. Where no worker is near, no call does anything.

    Args:
        config: of the engine.
        trackers: LMCache's, by request.
        chunk_tokens: tokens of a chunk.
        block_tokens: by KV cache group, tokens of a block.
    """

    def __init__(
        self,
        config: VllmConfig,
        trackers: Mapping[str, Any],
        chunk_tokens: int,
        block_tokens: Sequence[int],
    ) -> None:
        self._config = config
        self._trackers = trackers
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens

    @property
    def worker(self) -> WorkerHalf | None:
        """The worker's half of the connector, where it is in this process."""
        worker = near_connector(self._config)
        return worker if isinstance(worker, WorkerHalf) else None

    def name(self, request_id: str) -> None:
        """Name all chunks that a request may have; not twice in a step."""
        if (worker := self.worker) is not None:
            worker.name_early(request_id, lambda: self._described(request_id))

    def ask(self, request_id: str) -> None:
        """Ask where the chunks of a request's hit are; not twice in a step."""
        if (worker := self.worker) is None:
            return
        self.name(request_id)
        tracker = self._trackers[request_id]
        start = tracker.num_vllm_hit_tokens // self._chunk_tokens * self._chunk_tokens
        worker.ask_early(request_id, start, tracker.num_lmcache_hit_tokens)

    def begin(self, step: Step) -> None:
        """Begin what a step loads, as far as the server has answered."""
        if step.loads and (worker := self.worker) is not None:
            worker.begin_early(step)

    def _described(self, request_id: str) -> Any:
        """Return LMCache's description of a load, as if a whole prompt were a hit."""
        tracker = copy.copy(self._trackers[request_id])
        tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
        tracker.num_vllm_hit_tokens = 0
        chunks = len(tracker.all_token_ids) // self._chunk_tokens
        tracker.num_lmcache_hit_tokens = chunks * self._chunk_tokens
        return LMCacheMPRequestMetadata.GetRetrieveMetadata(
            tracker, self._chunk_tokens, self._block_tokens
        )
