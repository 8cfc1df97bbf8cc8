"""KV events: which blocks the tiers of a cache in this process hold, in vLLM's own words.

vLLM publishes what its KV cache holds, block by block. A router finds nothing by chunks of another
size and another name. So LMCache's listeners name the objects that a tier gains or loses, and here
in the scheduler's half, where requests are known, each becomes the blocks that vLLM itself
publishes of these tokens. An object's name has vLLM's hash of its last block.

Of several KV cache groups the events are of one: the first that keeps all tokens, if there is one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lmcache.v1.distributed.internal_api import L1ManagerListener, L2AdapterListener
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

from lmcache_xpu.cache.local_options import CPU, DISK, SHARED
from lmcache_xpu.model.kv_cache_groups import cache_groups
from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.cache.local_cache import LocalCache
    from lmcache_xpu.connector.tracked_request import TrackedRequest

    Change = tuple[str, list[ObjectKey], bool]  # a tier, objects, and whether it holds them now

MOST_CHUNKS = 2**16  # that are described, 2 to 3 KiB each
# How events name tiers: medium, locality to the publisher, ownership of a secondary tier.
PLACES = {
    CPU: (MEDIUM_CPU, "LOCAL", None),
    DISK: ("STORAGE", "LOCAL", None),
    SHARED: ("STORAGE", "REMOTE", "shared"),
}


class TierListener(L1ManagerListener, L2AdapterListener):  # type: ignore[misc]  # untyped bases
    """Notes the changes of one tier, in threads of LMCache that hold its locks."""

    def __init__(self, tier: str, changes: deque[Change]) -> None:
        self._tier, self._changes = tier, changes

    def _come(self, keys: list[ObjectKey], sizes: list[int] | None = None) -> None:
        self._changes.append((self._tier, keys, True))

    def _gone(self, keys: list[ObjectKey]) -> None:
        self._changes.append((self._tier, keys, False))

    def _used(self, keys: list[ObjectKey]) -> None:
        """Note nothing: they were there before."""

    on_l1_keys_write_finished = on_l1_keys_finish_write_and_reserve_read = _come
    on_l1_keys_reserved_read = on_l2_keys_stored = _come
    on_l1_keys_deleted_by_manager = on_l2_keys_deleted = _gone
    on_l1_keys_reserved_write = on_l1_keys_read_finished = _used
    on_l1_keys_accessed = on_l2_keys_accessed = _used


class Chunk(NamedTuple):
    """What events say of a chunk's blocks."""

    start: int  # its first token's number in the prompt
    tokens: array[int]
    hashes: list[Any]  # vLLM's, one per block
    parent: Any  # hash of the block before; None for the first of a prompt
    extra_keys: list[Any]  # what else vLLM hashes, one per block
    lora: tuple[int | None, str | None]  # number and name of the adapter

    @classmethod
    def of(cls, tracked: TrackedRequest, tokens: range, size: int) -> Self:
        """Describe a range of a request's tokens, in blocks of `size` tokens.

        A block that is larger than those which vLLM hashes has its last part's hash.
        """
        from vllm.v1.core.kv_cache_utils import (
            generate_block_hash_extra_keys,
            maybe_convert_block_hash,
        )

        request, hashed = tracked.request, tracked.sizes.hashed_tokens
        ends = range(tokens.start, tokens.stop + 1, size)
        parent, *hashes = (
            maybe_convert_block_hash(request.block_hashes[end // hashed - 1]) if end else None
            for end in ends
        )
        keys, image = [], 0
        for start in ends[:-1]:
            key, image = generate_block_hash_extra_keys(request, start, start + size, image)
            keys.append(key)
        lora = request.lora_request
        return cls(
            tokens.start,
            array("I", request.all_token_ids[tokens.start : tokens.stop]),
            hashes,
            parent,
            vllm.event_extra_keys(keys),
            (None, None) if lora is None else (lora.adapter_id, lora.name),
        )


class KVEvents:
    """Turns what a cache's tiers gain and lose into vLLM's events, on the scheduler's thread."""

    def __init__(self, local: LocalCache, groups: KVCacheConfig) -> None:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        stored = cache_groups(groups)
        whole = (number for number, group in enumerate(stored) if group.window is None)
        self._index = next(whole, 0)  # in LMCache's keys
        self._number = stored[self._index].number
        self._block_tokens = stored[self._index].block_tokens
        spec = groups.kv_cache_groups[self._number].kv_cache_spec
        self._kind = get_kv_cache_spec_kind(spec).value
        self._model_name, self._chunk_tokens = local.model_name, local.chunk_tokens
        self._chunks: dict[ObjectKey, Chunk] = {}  # the one described last is the last
        self._held: dict[str, set[ObjectKey]] = {tier: set() for tier in PLACES}
        self._changes: deque[Change] = deque()
        self._events: list[KVCacheEvent] = []
        local.listen(lambda tier: TierListener(tier, self._changes))

    @classmethod
    def of_engine(
        cls, config: VllmConfig, local: LocalCache | None, groups: KVCacheConfig
    ) -> Self | None:
        """Return those of an engine; None if it publishes none, or its cache is in a server."""
        if local is None or (switch := config.kv_events_config) is None:
            return None
        return cls(local, groups) if switch.enable_kv_cache_events else None

    def describe(self, tracked: TrackedRequest) -> None:
        """Note which blocks the chunks are that a request has hit, or stores in the next step.

        What tiers hold of it is published again, as vLLM does of its own hits: a router may have
        started since, or read from vLLM that all is gone, when only vLLM's own cache was reset.
        """
        if tracked.described == tracked.stored:
            return
        size, places = self._chunk_tokens, []
        first, tracked.described = tracked.described, tracked.stored
        keys = tracked.key_tokens().by_group[self._index]
        for number in range(first // size, tracked.stored // size):
            key, tokens = keys[number], range(number * size, (number + 1) * size)
            chunk = self._chunks.pop(key, None)
            self._chunks[key] = chunk or Chunk.of(tracked, tokens, self._block_tokens)
            places += [(tier, key) for tier in PLACES if key in self._held[tier]]
        self._publish_stored(places)
        while len(self._chunks) > MOST_CHUNKS:
            oldest = next(iter(self._chunks))
            for tier in PLACES:
                self._publish_removed(tier, [oldest])
            self._held[SHARED].discard(oldest)  # others hold as many as there is room for
            del self._chunks[oldest]

    def clear(self, requests: Iterable[TrackedRequest]) -> None:
        """Publish, after a reset, that no tier holds anything; these requests have begun before.

        Not by `AllBlocksCleared`: vLLM says that of its own cache, and by now may hold new blocks.
        """
        for tier in PLACES:
            self._publish_removed(tier, list(self._chunks))
        self._chunks.clear()
        self._held[SHARED].clear()  # its listener notes no removal
        for tracked in requests:
            tracked.described = tracked.stored

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in their order."""
        stored: list[tuple[str, ObjectKey]] = []
        while self._changes:
            tier, changed, is_held = self._changes.popleft()
            held = self._held[tier]
            keys = [key for key in changed if self._is_meant(key) and (key in held) != is_held]
            if is_held:
                held.update(keys)
                stored += [(tier, key) for key in keys if key in self._chunks]
            elif keys:
                self._publish_stored(stored)
                stored = []
                self._publish_removed(tier, keys)
                held.difference_update(keys)
                for key in keys:
                    if not any(key in others for others in self._held.values()):
                        self._chunks.pop(key, None)
        self._publish_stored(stored)
        events, self._events = self._events, []
        return events

    def _is_meant(self, key: ObjectKey) -> bool:
        """Whether an object is of the published group; a disk has other models' objects too."""
        return bool(key.object_group_id == self._index and key.model_name == self._model_name)

    def _publish_stored(self, places: Iterable[tuple[str, ObjectKey]]) -> None:
        """Publish what tiers hold, each block behind the one before it, in few events."""
        chunks = [(tier, self._chunks[key]) for tier, key in places]
        grows: dict[tuple[str, Any], BlockStored] = {}  # by its last block
        for tier, chunk in sorted(chunks, key=lambda item: item[1].start):
            if (event := grows.pop((tier, chunk.parent), None)) is None:
                medium, locality, ownership = PLACES[tier]
                event = BlockStored(
                    block_hashes=[],
                    parent_block_hash=chunk.parent,
                    token_ids=[],
                    block_size=self._block_tokens,
                    lora_id=chunk.lora[0],
                    medium=medium,
                    lora_name=chunk.lora[1],
                    extra_keys=[],
                    group_idx=self._number,
                    kv_cache_spec_kind=self._kind,
                    locality=locality,
                    **vllm.event_fields(BlockStored, ownership=ownership),
                )
                self._events.append(event)
            event.block_hashes += chunk.hashes
            event.token_ids += chunk.tokens
            event.extra_keys += chunk.extra_keys
            grows[tier, chunk.hashes[-1]] = event

    def _publish_removed(self, tier: str, keys: Iterable[ObjectKey]) -> None:
        """Publish that a tier holds no more what it has held, and what was described."""
        held = [key for key in keys if key in self._held[tier] and key in self._chunks]
        if not held:
            return
        medium, locality, ownership = PLACES[tier]
        self._events.append(
            BlockRemoved(
                block_hashes=[name for key in held for name in self._chunks[key].hashes],
                medium=medium,
                group_idx=self._number,
                locality=locality,
                **vllm.event_fields(BlockRemoved, ownership=ownership),
            )
        )
