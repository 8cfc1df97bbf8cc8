"""A cache in this process: LMCache's own tiers, asked as a scheduler and a worker ask."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.asking import CHUNK, CPU, OBJECT, ROOM, Asking, chunks, engine
from support.until import until

from lmcache_xpu.cache.local_cache import LocalCache
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.errors import SettingsError

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]


@pytest.fixture
def asking() -> Any:
    asking = Asking()
    yield asking
    asking.cache.close()


def test_both_halves_of_an_engine_share_a_cache_which_ends_with_the_last(asking):
    again = LocalCache.of_worker(engine("one"))
    assert again is asking.cache
    again.close()
    assert asking.store(1, 0, 4) == 4
    assert asking.hit(1, 4) == 4


def test_a_scheduler_whose_worker_is_in_another_process_is_told_so():
    with pytest.raises(SettingsError, match="a worker in a process of its own"):
        LocalCache.of_worker(engine("of nobody"))


def test_an_engine_of_several_devices_has_none():
    with pytest.raises(SettingsError, match="an engine of 2 devices"):
        LocalCache.make(engine("of two", world_size=2), LocalCacheOptions(), CPU, 1)


def test_room_is_made_in_one_piece_among_objects_of_another_size(asking, caplog, monkeypatch):
    """Two models, or the KV cache groups of one, share a memory. Nobody is warned of it."""
    monkeypatch.setattr(logging.getLogger("lmcache.v1.memory_management"), "propagate", True)
    for prompt in range(ROOM):
        asking.store(prompt, 0, 1)
    for prompt in range(0, ROOM, 2):  # between these are the ones that go first
        asking.hit(prompt, 1)
    asking.cache.register([4 * OBJECT], (0,))
    assert asking.store(1000, 0, 4) == 4
    assert asking.hit(1000, 4) == 4
    assert "batched allocate" not in caplog.text


@pytest.mark.parametrize("options", [{"cpu_gib": 0}, {"disk": "/d"}, {"chunk_tokens": "many"}])
def test_options_that_are_none_are_refused(options):
    with pytest.raises(SettingsError, match=r"xpu\.cache"):
        LocalCacheOptions.read(options)


def test_a_prompt_loses_its_end_to_the_next(asking):
    asking.compute(1, 60, 8)
    asking.compute(2, 8, 8)
    assert asking.held == ROOM
    assert (asking.hit(1, 60), asking.hit(2, 8)) == (56, 8)


def test_a_prompt_larger_than_the_memory_keeps_its_beginning(asking):
    asking.compute(1, 2 * ROOM, 8)
    assert asking.hit(1, 2 * ROOM) == ROOM


def test_what_a_look_up_has_found_is_not_evicted_until_it_is_read_or_unlocked(asking):
    asking.compute(1, 60, 60)
    keys = asking.keys(1, 60)
    assert asking.look_up(keys) == 60
    assert asking.store(2, 0, 8) == ROOM - 60
    assert len(asking.cache.locate(-1, chunks(keys, 20, 60)).result().rows) == 40
    asking.cache.unlock(keys, 60, 0, 20)
    asking.cache.release(-1)
    assert asking.store(3, 0, 40) == 40


def test_a_hit_that_lacks_a_chunk_is_none(asking):
    asking.compute(1, 8, 8)
    assert asking.cache.locate(-1, chunks(asking.keys(1, 9), 0, 9)).result() is None


def test_what_is_not_committed_is_found_by_nobody(asking):
    asking.cache.reserve(-1, chunks(asking.keys(1, 8), 0, 8), [()])
    assert asking.hit(1, 8) == 0
    assert asking.cache.commit(-1).result()
    assert not asking.cache.commit(-1).result()
    assert asking.hit(1, 8) == 8


def test_of_a_window_only_its_chunks_are_located():
    asking = Asking((0, 2), "of windows")
    asking.compute(1, 8, 8)
    keys = asking.keys(1, 8)
    assert asking.look_up(keys) == 8
    places = [row[:2] for row in asking.cache.locate(-1, chunks(keys, 0, 8)).result().rows]
    assert places == [*((0, number) for number in range(8)), (1, 6), (1, 7)]
    asking.cache.release(-1)
    assert asking.cache.reset()
    assert asking.held == 0
    asking.cache.close()


def test_what_is_on_disk_is_found_by_the_next_engine_and_forgotten_with_the_rest(tmp_path):
    size = ROOM * OBJECT / 2**30
    options = LocalCacheOptions(
        chunk_tokens=CHUNK, cpu_gib=size, disk_path=tmp_path / "disk", disk_gib=1
    )
    for number in range(3):
        asking = Asking(name=f"disk {number}", options=options)
        keys = asking.keys(1, 8)
        handle = asking.cache.find(keys, 8, in_memory=False)
        until(lambda handle=handle, asking=asking: asking.hit_of(handle) is not None)
        if number == 0:
            assert asking.hits[handle] == 0
            asking.store(1, 0, 8)
            [(_, adapter)] = asking.cache._storage.l2_adapters()
            until(lambda adapter=adapter: len(adapter._store) == 8)
        else:
            assert asking.hits[handle] == (8 if number == 1 else 0)
            asking.cache.unlock(keys, asking.hits[handle], 0, 8)
            assert asking.cache.reset()
        asking.cache.close()


@pytest.fixture(scope="module", params=[(0,), (0, 2)], ids=["one group", "two groups"])
def long_lived(request) -> Any:
    asking = Asking(request.param, "long-lived")
    yield asking
    asking.cache.close()


ACTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 80), st.sampled_from([3, 8, 20])), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(acts=ACTS)
def test_what_is_held_of_a_prompt_is_its_beginning(long_lived, acts):
    """After any stores and hits: the last prompt is held, and of all others no chunk in vain."""
    asking, groups = long_lived, len(long_lived.windows)
    assert asking.cache.reset()
    for prompt, count, step in acts:
        asking.compute(prompt, count, step)
        # The last chunks that fit are of one group more than of another, by a step at most.
        assert asking.hit(prompt, count) >= min(count, ROOM // groups - step * (groups - 1))
        if groups == 1:
            assert sum(asking.hit(number, 80) for number in range(1, 7)) == asking.held
