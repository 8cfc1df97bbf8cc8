"""Requests that wait for their loads, as the scheduler knows them.

vLLM gives such a request its blocks, and schedules it when the workers say that all has arrived
(status WAITING_FOR_REMOTE_KVS). Its life:

    1. `choose`       the look-up has promised tokens, and the request is to wait for them
    2. `allocated`    it has its blocks: the load is told to the workers with the next step
    3. `shares`       others that begin alike wait, to take the same blocks when they are filled
    4. `allocated`    again: all has arrived, or a part; LMCache stores from there on
       or `missed`    nothing has: it is looked up again
       or `finished`  it ended while it waited; vLLM keeps its blocks until the load has ended

This is the scheduler's half; the worker's is `load_queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_xpu.transfer.slots import slots_of
from lmcache_xpu.versions.lmcache import LoadSpec, ReqMeta, extract_request_configs

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.step_metadata import StepMetadata

__all__ = ["AsyncLoads"]


class _Load(NamedTuple):
    request: Request
    blocks: range  # that it fills, counted in the request
    tokens: int  # that LMCache has, from the first of the request on


class AsyncLoads:
    """The loads that requests of one scheduler wait for.

    Args:
        adapter: LMCache's connector.
        block_size: tokens of a block.
        named: gives the tokens by which LMCache names a request's chunks; see `cache_salt`.
    """

    def __init__(
        self,
        adapter: Any,
        block_size: int,
        named: Callable[[str, Sequence[int]], Sequence[int]],
    ) -> None:
        self._adapter = adapter
        self._block_size = block_size
        self._named = named
        self._chosen: set[str] = set()
        self._under_way: dict[str, _Load] = {}
        self._untold: list[ReqMeta] = []
        # Both since the last step was described.
        self._heard: set[str] = set()  # requests that the workers have named
        self._resumed: set[str] = set()  # requests that go on

    def choose(self, request_id: str, *, waits: bool) -> None:
        """Say whether a request that was looked up is to wait for its load."""
        (self._chosen.add if waits else self._chosen.discard)(request_id)

    def shares(self, request: Request, kept: int) -> bool:
        """Whether another request's load under way fills the block that this one lacks first.

        Args:
            request: that was not looked up yet.
            kept: tokens that vLLM's own prefix cache has of it.
        """
        block, hashes = kept // self._block_size, request.block_hashes
        if block >= len(hashes):
            return False
        return any(
            block in load.blocks
            and load.request is not request
            and load.request.block_hashes[block] == hashes[block]
            for load in self._under_way.values()
        )

    def missed(self, request_id: str) -> bool:
        """Whether nothing of a request's load has arrived, so that vLLM looks it up again."""
        return self._under_way.pop(request_id, None) is not None

    def allocated(self, request: Request, blocks: Sequence[int], tokens: int) -> int | None:
        """Begin the load of a request that waits, or go on with one whose load has ended.

        Args:
            request: has its blocks.
            blocks: all of them.
            tokens: to be loaded; 0 when the load has ended.

        Returns:
            How many tokens of a load that has ended are there; None if none has.
        """
        request_id = request.request_id
        if (load := self._under_way.pop(request_id, None)) is not None:
            there: int = request.num_computed_tokens
            # As if LMCache had promised what has arrived: it stores only what follows.
            chunk = self._adapter.config.chunk_size
            promised = load.tokens
            if there < promised - (promised == request.num_tokens):
                promised = there // chunk * chunk
            self._adapter.load_specs[request_id] = LoadSpec(there, promised, can_load=False)
            self._resumed.add(request_id)
            return there
        if request_id not in self._chosen or not tokens:
            return None
        self._chosen.discard(request_id)
        spec = self._adapter.load_specs.pop(request_id)
        end = spec.lmcache_cached_tokens
        first, last = spec.vllm_cached_tokens // self._block_size, end // self._block_size
        self._under_way[request_id] = _Load(request, range(first, last), end)
        self._untold.append(
            ReqMeta(
                request_id,
                token_ids=self._named(request_id, list(request.all_token_ids[:end])),
                slot_mapping=slots_of(blocks, self._block_size)[:end],
                load_spec=spec,
                request_configs=extract_request_configs(request.sampling_params),
            )
        )
        return None

    def finished(self, request_id: str) -> None:
        """Forget a request. A load that was told to the workers goes on."""
        self._chosen.discard(request_id)
        self._under_way.pop(request_id, None)
        self._resumed.discard(request_id)

    def drop_untold(self) -> None:
        """Forget the loads that the workers were not told of yet."""
        self._untold.clear()

    def hear(self, arrived: Iterable[str]) -> None:
        """Hear which requests have all that they have waited for, as vLLM hears it."""
        self._heard.update(arrived)

    def describe(self, metadata: StepMetadata) -> None:
        """Tell the workers, with a step, of the loads that begin; they load nothing again."""
        metadata.loads, self._untold = self._untold, []
        metadata.arrived = frozenset(self._heard)
        for request in metadata.requests:
            if request.req_id in self._resumed:
                request.load_spec = None
        self._heard.clear()
        self._resumed.clear()
