"""Two ranks that hold the same, with real engines of LMCache in layerwise mode, in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.caches import EngineCache, Spec, build
from support.channels import Channels
from support.connectors import make
from support.storage import TOKENS, make_config, make_metadata

from lmcache_xpu.cache_engine.engine import CacheEngine
from lmcache_xpu.cache_engine.guarded_connectors import LayerwiseConnector
from lmcache_xpu.cache_engine.health import pool
from lmcache_xpu.cache_engine.loans import LEDGER_BYTES, Borrower, Lender
from lmcache_xpu.cache_engine.storage_manager import POOL
from lmcache_xpu.cache_engine.token_database import TokenDatabase
from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.gpu_connector.async_load import AsyncLoad
from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.transfer.pool_memory import SharedMemory

CHUNKS, BLOCK, LAYERS, AT_ONCE = 3, 4, 5, 2
GROUPS = 3  # of two, two and one layers
LENGTH = CHUNKS * TOKENS
SPEC = Spec("MLA LBHNC", layers=LAYERS, blocks=2 * LENGTH // BLOCK, tokens=BLOCK)
HERE = torch.arange(LENGTH)
THERE = (torch.arange(LENGTH) + LENGTH).view(-1, BLOCK).flip(0).flatten()  # other blocks


class Rank:
    """One rank: LMCache's engine, its tiers, and the KV cache of vLLM's."""

    def __init__(self, path: Path, raw: torch.Tensor | None = None) -> None:
        config = make_config(path, hot=True, save_only_first_rank=False)
        config.use_layerwise = True
        metadata = make_metadata()
        self.cache: EngineCache = build(SPEC, raw)
        self.connector = make(self.cache, LayerwiseConnector, layers_at_once=AT_ONCE)
        self.unfilled = self.connector.unfilled = UnfilledBlocks(BLOCK)
        metadata.use_mla = True
        metadata.kv_shape = (GROUPS, 1, TOKENS, AT_ONCE, self.cache.geometry.hidden)
        self.engine = CacheEngine(
            config, metadata, TokenDatabase(config, metadata), self.connector, None, None
        )
        self.engine.post_init()
        self.engine.register(self.cache.engine, InFlight(BLOCK, stores=False))
        self.pool = self.engine.storage_manager.storage_backends[POOL]
        self.disk = self.engine.storage_manager.storage_backends["disk"]

    @property
    def in_use(self) -> int:
        """Bytes of the CPU tier that are not free."""
        used: int = self.pool.memory_allocator.pin_allocator.total_allocated_size
        return used

    def counts(self) -> set[tuple[int, bool]]:
        """References to chunks of the CPU tier, and whether they are pinned."""
        return {(obj.get_ref_count(), obj.is_pinned) for obj in self.pool.hot_cache.values()}

    def store(self, tokens: list[int]) -> None:
        """Until all is on disk."""
        for _ in self.engine.store_layer(tokens, slot_mapping=HERE, offset=0):
            pass
        for name in list(self.disk._writes.pending):
            self.disk._writes.settle(name)

    def leave_disk(self) -> None:
        """Empty the CPU tier."""
        self.pool.batched_remove(self.pool.get_keys())

    def close(self) -> None:
        manager = self.engine.storage_manager
        manager.close()
        manager.loop.close()


class Pair:
    """The first rank, which has the tiers, and one that borrows."""

    def __init__(self, directory: Path) -> None:
        self.first = Rank(directory / "first")
        self.second = Rank(directory / "second", self.first.cache.raw.clone())
        self.channels = Channels(1)
        memory = pool(self.first.engine)
        assert memory is not None
        lent = SimpleNamespace(address=memory.data_ptr(), tensor=memory)
        ledger = SharedMemory.make(LEDGER_BYTES)
        lender = Lender(self.channels.of_lender(), lent, ledger, 1)
        self.first.engine.lender = lender
        self.second.engine.borrower = Borrower(self.channels.of(0), lent, ledger, 0)
        self.computed = self.first.cache.twin()

    @property
    def ranks(self) -> tuple[Rank, Rank]:
        return self.first, self.second

    def store(self, tokens: list[int]) -> None:
        """Both ranks store what they have computed, and forget it."""
        for rank in self.ranks:
            rank.store(tokens)
            rank.cache.raw.zero_()

    def load(self, tokens: list[int], way: str, cached: int = 0) -> list[set[int]]:
        """Load on both ranks, as LMCache's adapter does, or as the thread that fetches.

        Returns:
            The blocks that were left unfilled, by rank.
        """
        return [blocks for _, blocks in [self.load_one(r, tokens, way, cached) for r in self.ranks]]

    def load_one(
        self, rank: Rank, tokens: list[int], way: str, cached: int = 0
    ) -> tuple[torch.Tensor, set[int]]:
        """Return which tokens LMCache says that it loaded, and the unfilled blocks."""
        load, in_flight = AsyncLoad(len(tokens) - cached), InFlight(BLOCK, stores=False)
        rank.connector.overlap = in_flight if way == "beside" else None
        arguments: dict[str, Any] = {
            "kvcaches": rank.cache.engine,
            "slot_mapping": THERE[: len(tokens)],
            "vllm_cached_tokens": cached,
        }
        if way == "waits":
            arguments |= {"load_owner": load, "req_id": "r"}
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: cached // TOKENS * TOKENS] = False
        in_flight.begin_step(frozenset(), len(tokens))
        if rank is self.second:  # which waits for word of each load, once
            assert self.channels.queues[way == "waits"][0].qsize() == 1
        steps = rank.engine.retrieve_layer(tokens, mask, **arguments)
        said = [next(steps), next(steps)]
        for layer in range(LAYERS):
            said.append(next(steps, None))
            in_flight.before_layer(layer)
            in_flight.after_layer(layer)
        said += list(steps)
        failed = in_flight.end_step() + rank.connector.failed_slots
        if way == "waits":
            load.feed(2**30)
            load.wait()
            failed += [slots for slots in [load.close()[1]] if slots is not None]
        rank.connector.failed_slots = []
        in_flight.close()
        for slots in failed:
            rank.unfilled.add_slots(slots)
        last = next(said[i] for i in range(len(said) - 1, -1, -1) if said[i] is not None)
        return last, rank.unfilled.take()

    def wanted(self, chunks: int, cached: int = 0) -> torch.Tensor:
        """All bytes of a KV cache that has the first chunks, and nothing else."""
        target = build(SPEC, torch.zeros_like(self.computed.raw))
        pairs = list(zip(HERE.tolist(), THERE.tolist(), strict=True))[cached : chunks * TOKENS]
        for layer in range(LAYERS):
            for here, there in pairs:
                target.put(0, layer, there, self.computed.token(0, layer, here))
        return target.raw

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
