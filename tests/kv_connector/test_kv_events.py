"""KV events: blocks as vLLM names them, of what all workers' tiers hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from support.kv_events import BLOCK, CHUNK, Database, changes, groups, request, told
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from lmcache_xpu.cache_engine.cache_salt import salted
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import kv_events
from lmcache_xpu.kv_connector.kv_events import KVEvents, TierReport, published
from lmcache_xpu.tiers.residency import CPU, DISK, SHARED, Change, Residency


def numbers(hashes: list[bytes]) -> list[int]:
    """As vLLM publishes hashes."""
    return [int.from_bytes(name[-8:], "big") for name in hashes]


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def events(database: Database) -> KVEvents:
    return KVEvents(database, BLOCK, groups())


TOKENS = list(range(100, 100 + 2 * CHUNK + 3))


def test_a_chunk_becomes_the_blocks_that_vllm_publishes(events, database):
    asked = request(TOKENS)
    told(events, asked)
    assert events.take() == []
    names = database.names(TOKENS)[:2]
    events.report(TierReport(1, changes(CPU, names[::-1])))  # a tier may take them in any order
    assert events.take() == [
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
    assert events.take() == []


def test_a_chunk_names_the_block_before_it(events, database):
    asked = request(TOKENS)
    told(events, asked)
    events.report(TierReport(1, changes(DISK, database.names(TOKENS)[1:2])))
    [event] = events.take()
    assert event.parent_block_hash == numbers(asked.block_hashes)[1]
    assert event.block_hashes == numbers(asked.block_hashes[2:4])
    assert event.token_ids == TOKENS[8:16]


def test_a_salted_request_publishes_its_own_tokens_and_its_salt(events, database):
    asked = request(TOKENS, salt="s")
    exchanged = salted(TOKENS, "s")
    told(events, asked, exchanged)
    events.report(TierReport(1, changes(CPU, database.names(exchanged)[:2])))
    [event] = events.take()
    assert event.token_ids == TOKENS[:16]
    assert event.extra_keys == [("s",), None, None, None]
    assert exchanged[0] > 2**32


def test_an_adapter_is_named(events, database):
    lora = SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="/a")
    told(events, request(TOKENS, lora_request=lora))
    events.report(TierReport(1, changes(CPU, database.names(TOKENS)[:1])))
    [event] = events.take()
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
def test_each_tier_has_a_place_and_goes_by_the_same(events, database, tier, place):
    told(events, request(TOKENS))
    names = database.names(TOKENS)[:1]
    for held in (True, False):
        events.report(TierReport(1, changes(tier, names, held)))
    stored, removed = events.take()
    assert isinstance(removed, BlockRemoved)
    for event in (stored, removed):
        assert (event.medium, event.locality, event.ownership) == place
    assert (removed.block_hashes, removed.group_idx) == (stored.block_hashes, 1)


def test_a_tier_holds_what_all_workers_hold(events, database):
    told(events, request(TOKENS))
    names = database.names(TOKENS)[:1]
    report = TierReport(2, changes(CPU, names))
    events.report(report)
    assert events.take() == []
    events.report(report)
    assert [type(event) for event in events.take()] == [BlockStored]
    gone = TierReport(2, changes(CPU, names, held=False))
    events.report(gone)
    assert [type(event) for event in events.take()] == [BlockRemoved]
    events.report(gone)
    assert events.take() == []


def test_what_workers_hold_alike_is_on_disk_once(events, database):
    """And in the memory of each."""
    told(events, request(TOKENS))
    names = database.names(TOKENS)[:1]
    events.report(TierReport(2, changes(DISK, names), shards=1))
    assert [event.medium for event in events.take()] == ["STORAGE"]
    events.report(TierReport(2, changes(CPU, names), shards=1))
    assert events.take() == []


def test_workers_of_one_step_are_added_up():
    reports = [TierReport(2, changes(CPU, [name])) for name in "ab"]
    assert reports[0].aggregate(reports[1]) == TierReport(2, changes(CPU, ["a", "b"]))
    reports = [TierReport(2, [], 1)] * 2
    assert reports[0].aggregate(reports[1]) == TierReport(2, [], 1)


def test_removed_and_stored_again_stay_in_order(events, database):
    told(events, request(TOKENS))
    [name] = database.names(TOKENS)[:1]
    order = [True, False, True]
    events.report(TierReport(1, [Change(CPU, name, held) for held in order]))
    told(events, request(TOKENS, "again"))  # the description went with the last tier
    assert [isinstance(event, BlockStored) for event in events.take()] == order


def test_what_a_request_finds_is_told_again(events, database):
    """For a router that began later, or heard from vLLM that all is gone."""
    told(events, request(TOKENS))
    events.report(TierReport(1, changes(CPU, database.names(TOKENS)[:2])))
    [first] = events.take()
    told(events, request(TOKENS, "again"))
    assert events.take() == [first]
    told(events, request(TOKENS, "again"))  # its next step
    assert events.take() == []


def test_what_the_disk_holds_from_an_earlier_run_is_told_when_it_is_asked_for(events, database):
    events.report(TierReport(1, changes(DISK, database.names(TOKENS)[:2])))
    assert events.take() == []  # of whatever tokens these are
    told(events, request(TOKENS))
    [event] = events.take()
    assert (event.medium, event.token_ids) == ("STORAGE", TOKENS[:16])


def test_prompts_that_fork_have_an_event_each(events, database):
    other = [*TOKENS[:8], *range(500, 508)]
    told(events, request(TOKENS[:16], "a"))
    told(events, request(other, "b"))
    names = {*database.names(TOKENS[:16]), *database.names(other)}
    events.report(TierReport(1, changes(CPU, sorted(names))))
    longer, shorter = sorted(events.take(), key=lambda event: len(event.block_hashes), reverse=True)
    assert (len(longer.block_hashes), len(shorter.block_hashes)) == (4, 2)
    assert shorter.parent_block_hash == longer.block_hashes[1]


def test_a_prompt_that_is_computed_in_parts_is_described_in_parts(events, database):
    asked = request(TOKENS)
    told(events, asked, TOKENS[:8])
    told(events, asked, TOKENS[:16])
    events.report(TierReport(1, changes(CPU, database.names(TOKENS)[:2])))
    [event] = events.take()
    assert event.token_ids == TOKENS[:16]


def test_of_a_partial_chunk_whole_blocks_are_told():
    database = Database(partial=True)
    events = KVEvents(database, BLOCK, groups())
    tokens = TOKENS[:14]  # a chunk, a block, and two tokens
    told(events, request(tokens))
    events.report(TierReport(1, changes(CPU, database.names(tokens))))
    [event] = events.take()
    assert event.token_ids == tokens[:12]


def test_after_a_reset_nothing_is_held_until_a_request_has_another_name(events, database):
    asked = request(TOKENS)
    told(events, asked)
    names = database.names(TOKENS)[:2]
    events.report(TierReport(1, [*changes(CPU, names), *changes(DISK, names[:1])]))
    stored = events.take()
    events.clear()
    gone = events.take()
    assert {(e.medium, h) for e in gone for h in e.block_hashes} == {
        (e.medium, h) for e in stored for h in e.block_hashes
    }
    assert all(isinstance(event, BlockRemoved) for event in gone)
    renamed = salted(TOKENS, "epoch")
    told(events, asked, renamed)
    events.report(TierReport(1, changes(CPU, names, held=False)))
    assert events.take() == []
    events.report(TierReport(1, changes(CPU, database.names(renamed)[:2])))
    assert [event.token_ids for event in events.take()] == [TOKENS[:16]]


def test_requests_that_ended_and_chunks_that_no_tier_took_are_forgotten(
    events, database, monkeypatch
):
    monkeypatch.setattr(kv_events, "WAITING", 3)
    for at in range(4):
        told(events, request([at] * 16, str(at)))
        events.finished(str(at))
    assert (len(events._requests), len(events._chunks), len(events._waiting)) == (0, 3, 3)
    name = database.names([3] * 16)[1]
    for held in (True, False):
        events.report(TierReport(1, changes(CPU, [name], held)))
    assert (len(events._chunks), len(events._held)) == (2, 0)


def test_blocks_of_another_size_are_not_told(events, database, caplog):
    asked = request(TOKENS)
    asked.block_hashes = asked.block_hashes[::2]
    told(events, asked)
    events.report(TierReport(1, changes(CPU, database.names(TOKENS)[:1])))
    assert events.take() == []
    assert "No KV events" in caplog.text


@pytest.mark.parametrize("block", [3, 16])
def test_chunks_that_cut_a_block_are_refused(database, block):
    with pytest.raises(SettingsError, match=f"chunks of 8 tokens.*whole blocks of {block}"):
        KVEvents(database, block, groups())


def test_a_client_that_names_no_chunks_is_refused():
    with pytest.raises(SettingsError, match="without token database"):
        KVEvents(None, BLOCK, groups())


@pytest.mark.parametrize(
    ("on", "asked", "publishes"),
    [(None, True, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_both_switches_must_be_on(on, asked, publishes, caplog):
    events = None if on is None else SimpleNamespace(enable_kv_cache_events=on)
    assert published(SimpleNamespace(kv_events_config=events), asked) is publishes
    assert ("without effect" in caplog.text) is (asked and not publishes)


def test_a_chunk_is_held_when_all_its_layers_are():
    residency = Residency(parts=3)
    for part in (0, 1, 1, 2):
        assert residency.take() == []
        residency.changed(CPU, "a", True, part)
    assert residency.take() == [Change(CPU, "a", True)]
    for part in (1, 0, 0, 2):
        residency.changed(CPU, "a", False, part)
    assert residency.take() == [Change(CPU, "a", False)]
    residency.changed(SHARED, "a", True)  # whole chunks
    assert residency.take() == [Change(SHARED, "a", True)]
