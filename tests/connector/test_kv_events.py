"""KV events: blocks as vLLM names them, of what the tiers of a cache in this process hold."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from support.tier_events import BLOCK, CHUNK, Engine, groups, request
from support.until import until
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from lmcache_xpu.cache.local_cache import LocalCache, PromptKeys
from lmcache_xpu.cache.local_options import CPU, DISK, SHARED, LocalCacheOptions
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector import kv_events
from lmcache_xpu.connector.kv_events import KVEvents
from lmcache_xpu.connector.tracked_request import BlockSizes, TrackedRequest

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
TOKENS = list(range(100, 100 + 2 * CHUNK + 3))


def numbers(hashes: list[bytes]) -> list[int]:
    """As vLLM publishes hashes."""
    return [int.from_bytes(name[-8:], "big") for name in hashes]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_chunk_becomes_the_blocks_that_vllm_publishes(engine):
    asked = request(TOKENS)
    engine.told(asked)
    assert engine.events.take() == []
    engine.change(CPU, engine.keys(TOKENS)[::-1])  # a tier may take them in any order
    assert engine.events.take() == [
        BlockStored(
            block_hashes=numbers(asked.block_hashes[:4]),
            parent_block_hash=None,
            token_ids=TOKENS[:16],
            block_size=BLOCK,
            lora_id=None,
            medium="CPU",
            lora_name=None,
            extra_keys=[None] * 4,
            group_idx=1,
            kv_cache_spec_kind="full_attention",
            locality="LOCAL",
        )
    ]
    assert engine.events.take() == []


def test_a_chunk_names_the_block_before_it(engine):
    asked = request(TOKENS)
    engine.told(asked)
    engine.change(DISK, engine.keys(TOKENS)[1:])
    [event] = engine.events.take()
    assert event.parent_block_hash == numbers(asked.block_hashes)[1]
    assert event.block_hashes == numbers(asked.block_hashes[2:4])
    assert event.token_ids == TOKENS[8:16]


def test_a_block_of_several_that_vllm_hashes_has_the_last_ones_hash():
    """As of vLLM's KV cache groups whose blocks are of several sizes."""
    engine, asked = Engine(groups(block=2 * BLOCK)), request(TOKENS)
    engine.told(asked)
    engine.change(CPU, engine.keys(TOKENS)[1:])
    [event] = engine.events.take()
    assert event.block_size == 2 * BLOCK
    assert [event.parent_block_hash, *event.block_hashes] == numbers(asked.block_hashes[1:4:2])


def test_of_several_groups_the_first_with_all_tokens_is_told():
    engine = Engine(groups(16, None, None), 3)
    engine.told(request(TOKENS))
    for group in (0, 2):
        engine.change(CPU, engine.keys(TOKENS, group=group))
    assert engine.events.take() == []
    engine.change(CPU, engine.keys(TOKENS, group=1))
    [event] = engine.events.take()
    assert event.group_idx == 2
    assert event.kv_cache_spec_kind == "full_attention"


def test_of_windows_alone_the_first_group_is_told():
    engine = Engine(groups(16, 32), 2)
    engine.told(request(TOKENS))
    engine.change(CPU, engine.keys(TOKENS))
    [event] = engine.events.take()
    assert (event.group_idx, event.kv_cache_spec_kind) == (1, "sliding_window")


def test_a_salted_request_publishes_its_salt(engine):
    tracked = engine.told(request(TOKENS, salt="s"))
    engine.change(CPU, tracked.key_tokens().by_group[0])
    [event] = engine.events.take()
    assert event.token_ids == TOKENS[:16]
    assert event.extra_keys == [("s",), None, None, None]


def test_an_adapter_is_named(engine):
    lora = SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="/a")
    engine.told(request(TOKENS, lora_request=lora))
    engine.change(CPU, engine.keys(TOKENS)[:1])
    [event] = engine.events.take()
    assert (event.lora_id, event.lora_name) == (3, "a")
    assert event.extra_keys is not None
    assert all("a" in keys for keys in event.extra_keys)


@pytest.mark.parametrize(
    ("tier", "place"),
    [
        (CPU, ("CPU", "LOCAL", None)),
        (DISK, ("STORAGE", "LOCAL", None)),
        (SHARED, ("STORAGE", "REMOTE", "shared")),
    ],
)
def test_each_tier_has_a_place_and_goes_by_the_same(engine, tier, place):
    engine.told(request(TOKENS))
    for held in (True, True, False, False):
        engine.change(tier, engine.keys(TOKENS)[:1], held=held)
    stored, removed = engine.events.take()
    assert isinstance(removed, BlockRemoved)
    for event in (stored, removed):
        assert (event.medium, event.locality, event.ownership) == place
    assert (removed.block_hashes, removed.group_idx) == (stored.block_hashes, 1)


def test_removed_and_stored_again_stay_in_order(engine):
    engine.told(request(TOKENS))
    engine.change(DISK, engine.keys(TOKENS)[:1])
    order = [True, False, True, False]
    for held in order:
        engine.change(CPU, engine.keys(TOKENS)[:1], held=held)
    kinds = [isinstance(event, BlockStored) for event in engine.events.take()]
    assert kinds == [True, *order]


def test_what_a_request_finds_is_told_again(engine):
    """For a router that began later, or heard from vLLM that all is gone."""
    engine.told(request(TOKENS))
    engine.change(CPU, engine.keys(TOKENS))
    [first] = engine.events.take()
    tracked = engine.told(request(TOKENS, "again"))
    assert engine.events.take() == [first]
    engine.tell(tracked, len(TOKENS))  # its next step
    assert engine.events.take() == []


def test_what_the_disk_holds_from_an_earlier_run_is_told_when_it_is_asked_for(engine):
    engine.change(DISK, engine.keys(TOKENS))
    assert engine.events.take() == []  # of whatever tokens these are
    engine.told(request(TOKENS))
    [event] = engine.events.take()
    assert (event.medium, event.token_ids) == ("STORAGE", TOKENS[:16])


def test_prompts_that_fork_have_an_event_each(engine):
    other = [*TOKENS[:8], *range(500, 508)]
    engine.told(request(TOKENS[:16], "a"))
    engine.told(request(other, "b"))
    engine.change(CPU, [*engine.keys(TOKENS), engine.keys(other)[1]])
    longer, shorter = sorted(
        engine.events.take(), key=lambda event: len(event.block_hashes), reverse=True
    )
    assert (len(longer.block_hashes), len(shorter.block_hashes)) == (4, 2)
    assert shorter.parent_block_hash == longer.block_hashes[1]


def test_a_prompt_that_is_computed_in_parts_is_described_in_parts(engine):
    tracked = engine.tracked(request(TOKENS))
    engine.tell(tracked, 8)
    engine.tell(tracked, 16)
    engine.change(CPU, engine.keys(TOKENS))
    [event] = engine.events.take()
    assert event.token_ids == TOKENS[:16]


def test_after_a_reset_nothing_is_held_until_a_request_has_other_keys(engine):
    running = engine.told(request(TOKENS))
    loading = engine.tracked(request(TOKENS, "loading"))
    loading.stored = len(TOKENS) // CHUNK * CHUNK
    keys = engine.keys(TOKENS)
    engine.change(CPU, keys)
    engine.change(SHARED, keys[:1])
    stored = engine.events.take()
    engine.events.clear([running, loading])
    gone = engine.events.take()
    assert all(isinstance(event, BlockRemoved) for event in gone)
    assert {(e.medium, h) for e in gone for h in e.block_hashes} == {
        (e.medium, h) for e in stored for h in e.block_hashes
    }
    engine.events.describe(loading)
    engine.told(request(TOKENS, "anew"), "another epoch")
    engine.change(CPU, keys, held=False)
    assert engine.events.take() == []
    engine.change(CPU, engine.keys(TOKENS, "another epoch"))
    assert [event.token_ids for event in engine.events.take()] == [TOKENS[:16]]


def test_chunks_that_no_tier_takes_or_holds_are_forgotten(engine, monkeypatch):
    monkeypatch.setattr(kv_events, "MOST_CHUNKS", 3)
    for token in range(4):
        engine.told(request([token] * 16))
    assert len(engine.events._chunks) == 3
    for held in (True, False):
        engine.change(CPU, engine.keys([3] * 16), held=held)
    assert len(engine.events.take()) == 2
    assert len(engine.events._chunks) == 1
    assert not any(engine.events._held.values())


def test_of_more_chunks_than_are_described_the_oldest_count_as_removed(engine, monkeypatch):
    monkeypatch.setattr(kv_events, "MOST_CHUNKS", 2)
    engine.told(request(TOKENS))
    for tier in (CPU, SHARED):
        engine.change(tier, engine.keys(TOKENS))
    stored = engine.events.take()
    engine.told(request([7] * 16))
    removed = engine.events.take()
    assert [event.medium for event in removed] == ["CPU", "STORAGE"] * 2
    assert {name for event in removed for name in event.block_hashes} == set(stored[0].block_hashes)
    engine.change(CPU, engine.keys(TOKENS)[1:], held=False)
    assert engine.events.take() == []
    engine.told(request(TOKENS, "again"))
    told_again = [event for event in engine.events.take() if isinstance(event, BlockStored)]
    assert [(event.medium, event.token_ids) for event in told_again] == [("CPU", TOKENS[:8])]


@pytest.mark.parametrize(
    ("switch", "has_cache", "publishes"),
    [(None, True, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_nothing_is_listened_to_where_events_are_off(switch, has_cache, publishes):
    listened = []
    cache = SimpleNamespace(chunk_tokens=CHUNK, model_name="m", listen=listened.append)
    events = None if switch is None else SimpleNamespace(enable_kv_cache_events=switch)
    config: Any = SimpleNamespace(kv_events_config=events)
    made = KVEvents.of_engine(config, cache if has_cache else None, groups())
    assert (made is not None) is bool(listened) is publishes


# LMCache's own tiers


OBJECT, ROOM = 4096, 4  # bytes, and objects


class Cached:
    """An engine with a cache of LMCache's that has room for four chunks.

    Args:
        disk: directory of a disk tier, if there is one.
    """

    def __init__(self, disk: Any = None) -> None:
        options = LocalCacheOptions(
            chunk_tokens=CHUNK, cpu_gib=ROOM * OBJECT / 2**30, disk_path=disk, disk_gib=disk and 1
        )
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0),
            kv_transfer_config=SimpleNamespace(engine_id="publishing"),
            model_config=SimpleNamespace(model="model"),
        )
        self.cache = LocalCache.make(config, options, torch.device("cpu"), 1)
        self.cache.register([OBJECT], [0])
        self.events = KVEvents(self.cache, groups())
        self._numbers = itertools.count()

    def tracked(self, tokens: list[int]) -> TrackedRequest:
        sizes, keys = BlockSizes(CHUNK, [BLOCK], BLOCK), PromptKeys("model", "salt", 1)
        tracked = TrackedRequest(request(tokens), "salt", sizes, keys)
        tracked.stored = len(tokens) // CHUNK * CHUNK
        return tracked

    def store(self, tokens: list[int]) -> list[Any]:
        """Store a prompt, and return its events."""
        tracked, number = self.tracked(tokens), next(self._numbers)
        keys = tracked.key_tokens()
        self.events.describe(tracked)
        self.cache.reserve(number, TokenRange("", keys, 0, len(keys) * CHUNK), [()])
        self.cache.commit(number)
        return self.events.take()


def test_memory_is_told_of_when_a_chunk_is_committed_and_when_it_is_evicted():
    cached = Cached()
    tracked = cached.tracked(TOKENS[:16])
    cached.events.describe(tracked)
    cached.cache.reserve(-1, TokenRange("", tracked.key_tokens(), 0, 2 * CHUNK), [()])
    assert cached.events.take() == []
    cached.cache.commit(-1)
    [stored] = cached.events.take()
    assert (type(stored), stored.medium, stored.token_ids) == (BlockStored, "CPU", TOKENS[:16])
    cached.store([7] * 16)
    removed, other = cached.store([9] * 8)  # in the place of the first prompt's end
    assert (type(removed), removed.medium) == (BlockRemoved, "CPU")
    assert removed.block_hashes == stored.block_hashes[2:]
    assert other.token_ids == [9] * 8
    cached.cache.close()


def test_a_disk_is_told_of_when_a_file_is_complete_and_after_a_restart(tmp_path):
    cached, events = Cached(tmp_path), []
    events += cached.store(TOKENS[:16])

    def on_disk() -> list[Any]:
        events.extend(cached.events.take())
        return [event for event in events if event.medium == "STORAGE"]

    until(lambda: sum(len(event.block_hashes) for event in on_disk()) == 4)
    cached.cache.close()
    again = Cached(tmp_path)
    assert again.events.take() == []
    again.events.describe(again.tracked(TOKENS[:16]))
    [event] = again.events.take()
    assert (event.medium, event.locality, event.token_ids) == ("STORAGE", "LOCAL", TOKENS[:16])
    assert again.cache.reset()
    assert [type(event) for event in again.events.take()] == [BlockRemoved]
    again.cache.close()
