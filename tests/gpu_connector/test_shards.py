"""A paged KV cache stored by one TP size and loaded by another one, through the disk tier.

Every layout whose tokens lie apart, with real connectors, tiers and memory objects.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support.caches import FUSED, PADDED, PAIR, SCALED, SPLIT, Spec, bits, build
from support.connectors import make, slots_of
from support.shards import rank_keys, rank_metadata
from support.storage import Engine

KV_HEADS, TOKENS = 4, 4
STORED, LOADED = (4, 1, 3), (0, 5, 2)  # blocks


def spec(kind: str, ranks: int) -> Spec:
    dtype = torch.uint8 if "scales" in kind else torch.bfloat16
    return Spec(kind, dtype, heads=KV_HEADS // ranks)


class Rank:
    """A rank's KV cache, its connector and its storage."""

    def __init__(self, path, kind: str, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.cache = build(spec(kind, ranks))
        self.connector = make(self.cache, layer_major=True)
        heads, layers = self.cache.spec.heads, self.cache.spec.layers
        metadata = rank_metadata(
            rank,
            ranks,
            KV_HEADS,
            layers=layers,
            tokens=TOKENS,
            dim=self.cache.geometry.hidden // heads,
        )
        self.engine = Engine(path, metadata=metadata)
        self.arguments = ([0, 4, 8], [4, 8, 12])

    def store(self) -> None:
        manager, shape = self.engine.manager, self.connector.get_shape(TOKENS)
        fmt = self.connector.FORMAT
        objs = [manager.allocate(shape, self.cache.spec.dtype, fmt=fmt) for _ in STORED]
        self.connector.batched_from_gpu(
            objs, *self.arguments, kvcaches=self.cache.engine, slot_mapping=slots_of(*STORED)
        )
        manager.batched_put(rank_keys(self.rank, self.ranks, range(3)), objs)
        self.engine.settle()

    def load(self) -> None:
        """Into a KV cache of zeros."""
        self.cache.raw.zero_()
        keys = rank_keys(self.rank, self.ranks, range(3))
        assert self.engine.manager.batched_contains(keys)[0] == 3
        objs = self.engine.manager.batched_get(keys, location="disk")
        self.connector.batched_to_gpu(
            objs, *self.arguments, kvcaches=self.cache.engine, slot_mapping=slots_of(*LOADED)
        )
        for obj in objs:
            obj.ref_count_down()

    def close(self) -> None:
        self.engine.close()
        assert self.engine.pool_in_use == 0


def heads_of(ranks: list[Rank], plane: int, layer: int, slot: int) -> torch.Tensor:
    """All heads of a token, of all ranks: `[bytes]`."""
    return torch.cat([bits(rank.cache.token(plane, layer, slot)) for rank in ranks])


# Intel's layout in each way; of the others, heads that are cut out and heads that are joined.
CASES = [("LBNHC", *sizes) for sizes in permutations((1, 2, 4), 2)]
CASES += [
    (kind, *sizes)
    for kind in (*FUSED, *PADDED, *SCALED, *SPLIT, *PAIR)
    if kind != "LBNHC"
    for sizes in ((1, 2), (4, 2))
]


@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_each_rank_gets_its_heads(kind, before, after, tmp_path):
    stored = [Rank(tmp_path, kind, rank, before) for rank in range(before)]
    for rank in stored:
        rank.store()
        rank.close()
    loaded = [Rank(tmp_path, kind, rank, after) for rank in range(after)]
    for rank in loaded:
        rank.load()
        rank.close()
    slots = [slots_of(*blocks).tolist() for blocks in (STORED, LOADED)]
    for plane in range(2):
        for layer in range(3):
            for here, there in zip(*slots, strict=True):
                wanted = heads_of(stored, plane, layer, here)
                assert torch.equal(heads_of(loaded, plane, layer, there), wanted)
    for rank in loaded:  # and no other byte was written
        for plane in range(2):
            for layer in range(3):
                for slot in slots_of(*LOADED).tolist():
                    nothing = torch.zeros_like(rank.cache.token(plane, layer, slot))
                    rank.cache.put(plane, layer, slot, nothing)
        assert not bits(rank.cache.raw).any()
