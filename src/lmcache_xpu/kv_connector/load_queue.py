"""Loads that requests wait for, as a worker knows them: fetched by a thread, moved with steps.

The thread asks LMCache for the chunks of one request after another; where they lie on a disk or on
a server, that takes its time, and no step waits for it. The engine's thread enqueues what was
fetched, some of it with each step, and tells vLLM which requests have all. What did not arrive is
recorded as any other load's, before vLLM is told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.gpu_connector.async_load import AsyncLoad
from lmcache_xpu.kv_connector.load_policy import LoadSpeeds
from lmcache_xpu.metrics import loaded
from lmcache_xpu.transfer.tuning import tuning_of

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.engine import CacheEngine
    from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
    from lmcache_xpu.versions.lmcache import ReqMeta

__all__ = ["LoadQueue"]


@dataclass(slots=True)
class _Fetched:
    request_id: str
    load: AsyncLoad
    far_per_s: float | None  # tokens a second that were fetched from beyond this host's memory
    told: bool = False  # vLLM was, that it has arrived


class LoadQueue:
    """The loads of one worker that requests wait for. Called by the engine's thread.

    Args:
        engine: LMCache's.
        unfilled: the record of failed loads.
    """

    def __init__(self, engine: CacheEngine, unfilled: UnfilledBlocks) -> None:
        self._engine = engine
        self._unfilled = unfilled
        self._kv_caches: list[torch.Tensor] = []  # of the engine, once they are registered
        self._tuning = tuning_of("cpu")
        self._speeds = LoadSpeeds()  # of the last loads, until `take_speeds`
        self._thread = ThreadPoolExecutor(1, "lmcache-xpu-fetch")
        self._asked = self._answered = 0  # loads that the thread was asked for, and has ended
        self._fetched: deque[_Fetched] = deque()  # the thread adds, in the order of `begin`
        self._moving: list[_Fetched] = []

    def register(self, kv_caches: Iterable[torch.Tensor]) -> None:
        """Take the engine's KV cache, one tensor for each layer."""
        self._kv_caches = list(kv_caches)
        self._tuning = tuning_of(self._kv_caches[0].device.type)

    def begin(self, requests: Iterable[ReqMeta]) -> None:
        """Fetch what these requests wait for.

        Args:
            requests: LMCache's descriptions; the blocks may be written once this step is enqueued.
        """
        for request in requests:
            loaded("async")
            self._asked += 1
            self._thread.submit(self._fetch, request)

    def refuse(self, requests: Iterable[ReqMeta]) -> None:
        """Load nothing for these requests; they hear of it as of loads that failed."""
        for request in requests:
            self._asked += 1
            self._thread.submit(self._give_up, request)

    def fail(self, request_ids: Iterable[str]) -> None:
        """Report the loads of these requests as ended; their blocks are recorded as unfilled."""
        for request_id in request_ids:
            self._asked += 1
            self._thread.submit(self._end, request_id, AsyncLoad(0))

    def await_told(self, arrived: frozenset[str]) -> None:
        """Let the engine's stream wait for the rest of loads that vLLM was told of a little early.

        Args:
            arrived: requests of which vLLM has heard since the last step. From this step on their
                blocks may be read, by others too, and written if they have ended.
        """
        for item in self._moving:
            if item.request_id in arrived:
                item.load.wait()

    def move(self) -> set[str]:
        """Enqueue more of what was fetched, behind the step.

        Returns:
            The requests that have all, or soon will; each is named once. See `await_told`.
        """
        while self._fetched:
            self._moving.append(self._fetched.popleft())
        room = self._tuning.async_bytes - sum(item.load.bytes_under_way for item in self._moving)
        for item in self._moving:
            if room <= 0:
                break
            room -= item.load.feed(room)
        told = set()
        for item in self._moving:
            if not item.told and item.load.arrived(self._tuning.async_bytes_early):
                item.told = True
                told.add(item.request_id)
        for item in [item for item in self._moving if item.load.arrived()]:
            self._moving.remove(item)
            seconds, failed_slots = item.load.close()
            if failed_slots is not None:
                self._unfilled.add_slots(failed_slots)
            else:
                near_per_s = item.load.tokens / seconds if seconds else self._speeds.near
                self._speeds = LoadSpeeds(near_per_s, item.far_per_s or self._speeds.far)
        return told

    @property
    def fetching(self) -> bool:
        """Whether the thread is at work."""
        return self._answered < self._asked

    def take_speeds(self) -> LoadSpeeds:
        """Return how fast the last loads were that have ended since the last call."""
        speeds, self._speeds = self._speeds, LoadSpeeds()
        return speeds

    def close(self) -> None:
        """Fetch nothing more, and wait for what is under way. May be called again."""
        self._thread.shutdown(cancel_futures=True)
        self._moving += self._fetched
        self._fetched.clear()
        for item in self._moving:
            item.load.abandon()
        self._moving.clear()

    # The thread that fetches

    def _fetch(self, request: ReqMeta) -> None:
        spec, request_id = request.load_spec, request.req_id
        kept, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
        load = AsyncLoad(end - kept)
        mask = torch.ones(end, dtype=torch.bool)
        chunk: int = self._engine.config.chunk_size
        mask[: kept // chunk * chunk] = False
        slots = request.slot_mapping[:end]
        arguments: dict[str, Any] = {
            "kvcaches": self._kv_caches,
            "slot_mapping": slots,
            "vllm_cached_tokens": kept,
            "req_id": request_id,
            "load_owner": load,
        }
        far, begun = self._engine.far_tokens(request_id), time.perf_counter()
        try:
            if self._engine.use_layerwise:
                # It records by itself what is missing.
                deque(self._engine.retrieve_layer(request.token_ids, mask, **arguments), maxlen=0)
            else:
                there = self._engine.retrieve(
                    request.token_ids, mask, request_configs=request.request_configs, **arguments
                )
                missing = slots[kept:][~there[kept:]]
                if len(missing):
                    self._unfilled.add_slots(missing)
        except Exception as error:  # whatever: the request is computed, and the next one is fetched
            self._unfilled.add_load(error, arguments, kept)
        finally:
            seconds = time.perf_counter() - begun
            self._end(request_id, load, far / seconds if far else None)

    def _give_up(self, request: ReqMeta) -> None:
        self._unfilled.refuse([request])
        self._end(request.req_id, AsyncLoad(0))

    def _end(self, request_id: str, load: AsyncLoad, far_per_s: float | None = None) -> None:
        self._engine.lookup_unpin(request_id)
        self._fetched.append(_Fetched(request_id, load, far_per_s))
        self._answered += 1
