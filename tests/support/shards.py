"""Ranks of engines of several TP sizes, whose chunks are parts of one truth."""

from __future__ import annotations

import torch
from support.storage import DIM, LAYERS, TOKENS, make_key, make_metadata

from lmcache_xpu.tiers.shard import Shard, ShardedMetadata

KV_HEADS = 8
SIZES = (1, 2, 4)
NUMBERS = range(5)  # of chunks


def rank_metadata(
    rank, ranks, heads=KV_HEADS, *, divisible=True, layers=LAYERS, tokens=TOKENS, dim=DIM
):
    """What LMCache's tiers are told in one rank of an engine."""
    metadata = make_metadata(rank, ranks)
    metadata.kv_shape = (layers, 2, tokens, max(1, heads // ranks), dim)
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


def same_bytes(first, second):
    return torch.equal(first.view(torch.int16), second.view(torch.int16))


# With the disk tier


def store(engine, number, size, numbers, heads=KV_HEADS):
    keys = rank_keys(number, size, numbers)
    content = [part(each, number, size, heads) for each in numbers]
    engine.manager.batched_put(keys, [engine.allocate(each, each.shape) for each in content])
    engine.settle()


def fill(opened, numbers=NUMBERS, heads=KV_HEADS):
    """Chunks of an engine that then ends."""
    for number, engine in enumerate(opened):
        store(engine, number, len(opened), numbers, heads)
    for engine in opened:
        engine.close()


def load(engine, number, size, numbers=NUMBERS, heads=KV_HEADS):
    """Which chunks a look-up promises and a load brings, every byte compared."""
    keys = rank_keys(number, size, numbers)
    promised, mapping = engine.manager.batched_contains(keys, pin=True)
    objs = engine.manager.batched_get(keys[:promised], location="disk") if promised else []
    for each in mapping.get("disk", []):
        assert engine.tier.unpin(each)
    loaded = []
    for each, obj in zip(numbers, objs, strict=False):
        if obj is not None:
            assert same_bytes(obj.tensor, part(each, number, size, heads))
            assert obj.get_num_tokens() == TOKENS
            obj.ref_count_down()
            loaded.append(each)
    return promised, loaded
