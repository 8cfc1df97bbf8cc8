"""KV events: which blocks the tiers hold, told to routers in vLLM's own words.

vLLM publishes what its KV cache holds, block by block. LMCache would add its chunks: of another
size and another hash, and with the token that `cache_salt` exchanged. A router finds nothing by
them. So workers report names of chunks (see `residency`), and here in the scheduler's half, where
requests are known, each becomes the blocks that vLLM itself publishes of these tokens.

A tier holds a chunk when all workers that store in it hold their part, and no longer when one does
not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector.chunk_blocks import ChunkBlocks
from lmcache_xpu.tiers.residency import CPU, DISK, SHARED, Change, chunk_name
from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["KVEvents", "TierReport", "published"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

WAITING = 2**14  # chunks of requests that no tier has taken yet, 2 to 3 KiB each


class Place(NamedTuple):
    """How events name a tier."""

    medium: str
    locality: str  # to the publisher
    ownership: str | None  # of a secondary tier


PLACES = {
    CPU: Place(MEDIUM_CPU, "LOCAL", None),
    DISK: Place("STORAGE", "LOCAL", None),
    SHARED: Place("STORAGE", "REMOTE", "shared"),
}


@dataclass
class TierReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """What changed in the tiers of some workers.

    Args:
        workers: that store each chunk in their memory, each its own part.
        changes: of any of them, each worker's in their order.
        shards: parts of it on disk or in a server, where there is one of what workers hold alike;
            None: as many as workers.
    """

    workers: int
    changes: list[Change]
    shards: int | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierReport:
        """This one's changes and those of another worker."""
        assert isinstance(other, TierReport)
        return TierReport(self.workers, self.changes + other.changes, self.shards)


def published(config: VllmConfig, enabled: bool) -> bool:
    """Whether an engine publishes events of the tiers.

    Args:
        config: of the engine; its `--kv-events-config` is vLLM's switch.
        enabled: LMCache's switch, `enable_kv_events`.
    """
    events = config.kv_events_config
    on = events is not None and events.enable_kv_cache_events
    if enabled and not on:
        logger.warning(
            "LMCache enable_kv_events without effect: vLLM has no --kv-events-config "
            "(docs: troubleshooting#kv-events-off)"
        )
    return enabled and on


@dataclass(slots=True)
class _Prompt:
    """A request, and how many of its chunks are described."""

    request: Request
    end: int = 0
    name: Any = None  # of the last one
    first: int | None = None  # token, of those that name chunks


class KVEvents:
    """Turns the workers' reports into vLLM's events.

    Args:
        database: LMCache's, which names chunks by tokens.
        block_tokens: of a block that vLLM hashes.
        groups: vLLM's KV cache groups, of which one is stored.

    Raises:
        SettingsError: chunks are not made of whole blocks, or can't be named here.
    """

    def __init__(self, database: Any, block_tokens: int, groups: KVCacheConfig) -> None:
        if database is None or database.chunk_size % block_tokens:
            raise SettingsError(
                "KV events of a look-up client without token database"
                if database is None
                else f"KV events of chunks of {database.chunk_size} tokens",
                f"chunks of whole blocks of {block_tokens} tokens, looked up by LMCache's own",
                "Change LMCache's chunk_size, or leave enable_kv_events unset.",
            )
        self._database = database
        self._block_tokens = block_tokens
        self._group, self._kind = _stored_group(groups)
        self._requests: dict[str, _Prompt] = {}
        self._chunks: dict[str, ChunkBlocks] = {}
        self._waiting: dict[str, None] = {}  # of these, those that no tier holds; oldest first
        self._held: dict[tuple[str, str], int] = {}  # workers, by tier and chunk
        self._parts = dict.fromkeys(PLACES, 1)  # of a chunk, by tier
        self._events: list[KVCacheEvent] = []
        self._complained = False

    def admit(self, request: Request) -> None:
        """Before a request is looked up."""
        self._requests.setdefault(request.request_id, _Prompt(request))

    def finished(self, request_id: str) -> None:
        """When a request has ended, in whatever way."""
        self._requests.pop(request_id, None)

    def describe(self, metadata: Any) -> None:
        """Note of which blocks the chunks are that workers are told to load or store.

        Args:
            metadata: LMCache's, of a step; with the tokens that name chunks.
        """
        for meta in metadata.requests:
            if (prompt := self._requests.get(meta.req_id)) is not None and len(meta.token_ids):
                self._describe(prompt, meta.token_ids)

    def report(self, report: TierReport) -> None:
        """Take what workers report after a step."""
        shards = report.workers if report.shards is None else report.shards
        self._parts = {CPU: report.workers, DISK: shards, SHARED: shards}
        stored: list[tuple[str, str]] = []
        for tier, chunk, present in report.changes:
            before = self._held.get((tier, chunk), 0)
            after = before + (1 if present else -1)
            if after > 0:
                self._held[tier, chunk] = after
            else:
                self._held.pop((tier, chunk), None)
            if present and before < self._parts[tier] <= after:
                stored.append((tier, chunk))
            elif not present and after < self._parts[tier] <= before:
                self._announce(stored)
                stored = []
                self._remove(tier, [chunk])
        self._announce(stored)

    def clear(self) -> None:
        """Tell that no tier holds anything that is still found, as after a reset.

        Not by `AllBlocksCleared`: vLLM says that of its own cache, and by now may hold new blocks.
        Chunks that a tier still keeps, under names that nothing asks for, count no more.
        """
        for tier in PLACES:
            self._remove(
                tier, [name for name, chunk in self._chunks.items() if tier in chunk.tiers]
            )
        self._chunks.clear()
        self._waiting.clear()
        for prompt in self._requests.values():
            prompt.first = None

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def _describe(self, prompt: _Prompt, tokens: list[int]) -> None:
        request, size = prompt.request, self._database.chunk_size
        hashed = len(request.block_hashes) * self._block_tokens
        if not 0 <= request.num_tokens - hashed < self._block_tokens:
            if not self._complained:
                logger.error(
                    "No KV events: vLLM hashes other blocks than of %d "
                    "(docs: troubleshooting#kv-events-blocks)",
                    self._block_tokens,
                )
            self._complained = True
            return
        if prompt.first != tokens[0]:  # another name for all of them
            prompt.end, prompt.first = 0, tokens[0]
            prompt.name = self._database._get_init_hash()
        places: list[tuple[str, str]] = []
        while prompt.end + size <= len(tokens):
            self._add(prompt, prompt.end + size, tokens, places)
            prompt.end += size
        if self._database.config.save_unfull_chunk and prompt.end < len(tokens):
            whole = prompt.name
            self._add(prompt, len(tokens), tokens, places)
            prompt.name = whole  # it may grow
        self._announce(places)

    def _add(
        self, prompt: _Prompt, end: int, tokens: list[int], places: list[tuple[str, str]]
    ) -> None:
        """Describe a request's next chunk, and note the tiers that hold it already."""
        prompt.name = self._database._hash_tokens(list(tokens[prompt.end : end]), prompt.name)
        name = chunk_name(prompt.name)
        if (chunk := self._chunks.get(name)) is not None:
            # Again, as vLLM does of its own hits: a router may have begun since, or been told by
            # vLLM that all is gone, when only the engine's own cache was reset.
            places += [(tier, name) for tier in chunk.tiers]
            return
        blocks = range(prompt.end // self._block_tokens, end // self._block_tokens)
        if not blocks:
            return
        self._chunks[name] = ChunkBlocks.of(prompt.request, blocks, self._block_tokens)
        tiers = [tier for tier in PLACES if self._held.get((tier, name), 0) >= self._parts[tier]]
        places += [(tier, name) for tier in tiers]  # e.g. on disk since an earlier run
        if not tiers:
            self._waiting[name] = None
            if len(self._waiting) > WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest], self._chunks[oldest]

    def _announce(self, places: Iterable[tuple[str, str]]) -> None:
        """Tell what tiers hold: a block after those that it follows, in one event if possible."""
        chunks = [(tier, name, self._chunks[name]) for tier, name in places if name in self._chunks]
        grows: dict[tuple[str, Any], BlockStored] = {}  # by its last block
        for tier, name, chunk in sorted(chunks, key=lambda item: item[2].start):
            chunk.tiers.add(tier)
            self._waiting.pop(name, None)
            event = grows.pop((tier, chunk.parent), None) or self._stored(tier, chunk)
            event.block_hashes += chunk.hashes
            event.token_ids += chunk.tokens
            event.extra_keys += chunk.extra_keys
            grows[tier, chunk.hashes[-1]] = event

    def _stored(self, tier: str, chunk: ChunkBlocks) -> BlockStored:
        """An event that begins with a chunk's first block, and has none yet."""
        place, (lora_id, lora_name) = PLACES[tier], chunk.lora
        event = BlockStored(
            block_hashes=[],
            parent_block_hash=chunk.parent,
            token_ids=[],
            block_size=self._block_tokens,
            lora_id=lora_id,
            medium=place.medium,
            lora_name=lora_name,
            extra_keys=[],
            group_idx=self._group,
            kv_cache_spec_kind=self._kind,
            locality=place.locality,
            **vllm.event_fields(BlockStored, ownership=place.ownership),
        )
        self._events.append(event)
        return event

    def _remove(self, tier: str, names: list[str]) -> None:
        """Tell that a tier holds some chunks no longer."""
        hashes: list[Any] = []
        for name in names:
            chunk = self._chunks.get(name)
            if chunk is None or tier not in chunk.tiers:
                continue
            chunk.tiers.discard(tier)
            hashes += chunk.hashes
            if not chunk.tiers:
                del self._chunks[name]
        if hashes:
            place = PLACES[tier]
            self._events.append(
                BlockRemoved(
                    block_hashes=hashes,
                    medium=place.medium,
                    group_idx=self._group,
                    locality=place.locality,
                    **vllm.event_fields(BlockRemoved, ownership=place.ownership),
                )
            )


def _stored_group(groups: KVCacheConfig) -> tuple[int, str]:
    """Number and kind of the group whose blocks are stored; see `kv_cache_facts`."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    for number, group in enumerate(groups.kv_cache_groups):
        if vllm.is_transferred(group):
            return number, get_kv_cache_spec_kind(group.kv_cache_spec).value
    raise AssertionError("no KV cache group is stored")
