"""A server that was filled with one TP size is hit with another one: the same bytes, or nothing."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from support.servers import needs_server
from support.shards import KV_HEADS, SIZES, part, rank_keys, rank_metadata, same_bytes

pytestmark = needs_server

PAIRS = list(permutations(SIZES, 2))
NUMBERS = range(5)


@pytest.fixture
def ranks(engine):
    def start(size, heads=KV_HEADS, *, divisible=True):
        described = [rank_metadata(n, size, heads, divisible=divisible) for n in range(size)]
        return [engine(pool_chunks=512, metadata=metadata) for metadata in described]

    return start


def store(engine, number, size, numbers, heads=KV_HEADS):
    objs = []
    for each in numbers:
        content = part(each, number, size, heads)
        obj = engine.manager.allocate(content.shape, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
        obj.tensor.copy_(content)
        objs.append(obj)
    engine.manager.batched_put(rank_keys(number, size, numbers), objs)
    engine.wait_until_on_their_way(0)


def fill(opened, numbers=NUMBERS, heads=KV_HEADS):
    for number, engine in enumerate(opened):
        store(engine, number, len(opened), numbers, heads)


def load(engine, number, size, numbers=NUMBERS, heads=KV_HEADS):
    """Which chunks a look-up promises and a load brings, every byte compared."""
    keys = rank_keys(number, size, numbers)
    promised = engine.backend.batched_contains(keys)
    loaded = []
    for each, key in zip(numbers, keys, strict=True):
        if (obj := engine.backend.get_blocking(key)) is not None:
            assert same_bytes(obj.tensor, part(each, number, size, heads))
            obj.ref_count_down()
            loaded.append(each)
    return promised, loaded


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_size_finds_the_chunks_of_each_other(ranks, before, after):
    fill(ranks(before))
    for number, engine in enumerate(ranks(after)):
        assert load(engine, number, after, [*NUMBERS, 9]) == (5, list(NUMBERS))


def test_chunks_of_several_sizes_make_one_prefix(ranks):
    fill(ranks(1), range(3))
    fill(ranks(4), range(3, 6))
    opened = ranks(2)
    for number, engine in enumerate(opened):
        store(engine, number, 2, range(6, 8))
        assert load(engine, number, 2, range(9)) == (8, list(range(8)))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
@pytest.mark.parametrize("damage", ["cut", "flip", "swap"])
def test_a_damaged_slice_is_a_miss(ranks, server, before, after, damage):
    opened = ranks(before)
    last = opened[-1].backend.connection._connector
    file, other = (
        last._stored.name(last._texts.text(key)) for key in rank_keys(before - 1, before, (2, 3))
    )
    fill(opened)
    value = bytearray(server.client.get(file))
    match damage:
        case "cut":
            del value[-1:]
        case "flip":
            value[-5] ^= 4
        case "swap":
            value = server.client.get(other)
    server.client.set(file, bytes(value))
    for number, engine in enumerate(ranks(after)):
        whole = before > after and number == 0  # it needs the other slices
        assert load(engine, number, after)[1] == (list(NUMBERS) if whole else [0, 1, 3, 4])
        assert load(engine, number, after)[0] == (5 if whole else 2)


def test_a_part_of_the_slices_is_a_miss(ranks):
    opened = ranks(4)
    for number, engine in enumerate(opened):
        store(engine, number, 4, range(2 if number == 3 else 5))
    first, second = ranks(2)
    assert load(first, 0, 2) == (5, list(NUMBERS))
    assert load(second, 1, 2) == (2, [0, 1])
    assert load(ranks(1)[0], 0, 1) == (2, [0, 1])


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_blocks_of_an_order_of_their_own_are_not_found(ranks, before, after):
    fill(ranks(before, divisible=False))
    for number, engine in enumerate(ranks(after, divisible=False)):
        assert load(engine, number, after) == (0, [])


def test_no_room_for_a_chunk_that_is_made_is_a_miss(ranks, engine):
    fill(ranks(1))
    small = engine(pool_chunks=1, metadata=rank_metadata(0, 2))
    assert load(small, 0, 2) == (5, [])


def asked(server):
    """Commands of look-ups, and the bytes that went to the server."""
    stats = server.client.info("commandstats")
    return stats.get("cmdstat_exists", {}).get("calls", 0)


def round_trips(engine):
    """Counts the pipelines of a rank."""
    client = engine.backend.connection._connector._server
    pipeline, count = client.pipeline, []

    def counted(*args, **kwargs):
        count.append(1)
        return pipeline(*args, **kwargs)

    client.pipeline = counted
    return count


def test_a_look_up_of_nothing_takes_one_round_trip_and_four_more_questions(ranks, server):
    first = ranks(2)[0]
    trips = round_trips(first)
    before = asked(server)
    assert first.backend.batched_contains(rank_keys(0, 2, range(100))) == 0
    assert len(trips) == 1
    assert asked(server) - before == 100 + 3  # TP sizes 1, 4, 8


def test_a_look_up_of_what_is_there_takes_one_round_trip(ranks, server):
    opened = ranks(2)
    fill(opened)
    trips = round_trips(opened[0])
    assert opened[0].backend.batched_contains(rank_keys(0, 2, NUMBERS)) == 5
    assert len(trips) == 1
    assert opened[0].backend.batched_contains(rank_keys(0, 2, [*NUMBERS, 9, 10])) == 5
    assert len(trips) == 3
    fill(ranks(4), range(5, 50))
    assert opened[0].backend.batched_contains(rank_keys(0, 2, range(60))) == 50
    assert len(trips) == 7
