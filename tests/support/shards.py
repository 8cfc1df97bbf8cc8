"""Ranks of engines of several TP sizes, whose chunks are parts of one truth."""

from __future__ import annotations

import torch
from support.storage import DIM, LAYERS, TOKENS, make_key, make_metadata

from lmcache_xpu.tiers.shard import Shard, ShardedMetadata

KV_HEADS = 8
SIZES = (1, 2, 4)


def rank_metadata(rank, ranks, heads=KV_HEADS, *, divisible=True):
    """What LMCache's tiers are told in one rank of an engine."""
    metadata = make_metadata(rank, ranks)
    metadata.kv_shape = (LAYERS, 2, TOKENS, max(1, heads // ranks), DIM)
    shard = Shard.of_rank(rank, ranks, heads, divisible=divisible)
    return ShardedMetadata.of(metadata, shard)


def rank_keys(rank, ranks, numbers):
    return [make_key(number, world_size=ranks, worker_id=rank) for number in numbers]


def whole(number, heads=KV_HEADS):
    """A chunk of all heads, any bytes: `[planes, layers, tokens, heads, elements]`."""
    generator = torch.Generator().manual_seed(number)
    shape = (2, LAYERS, TOKENS, heads, DIM)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)


def part(number, rank, ranks, heads=KV_HEADS):
    """What a rank holds of it, as vLLM shares heads out: `[planes, layers, tokens, hidden]`."""
    copies = max(1, ranks // heads)
    each = max(1, heads // ranks)
    first = rank // copies * each
    return whole(number, heads)[..., first : first + each, :].flatten(3).view(torch.bfloat16)


def same_bytes(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
