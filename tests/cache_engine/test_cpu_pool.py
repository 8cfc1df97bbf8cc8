"""LMCache's CPU tier tells of each chunk that comes or goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lmcache")
from support.kv_events import changes
from support.storage import Engine, content, make_key

from lmcache_xpu.cache_engine.cpu_pool import reporting
from lmcache_xpu.tiers.residency import CPU, Residency


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_lmcaches_index_tells_of_keys_however_they_come_and_go(policy):
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy

    seen: list[tuple[str, bool]] = []
    residency = Residency()
    index = reporting(
        type(get_cache_policy(policy).init_mutable_mapping()),
        lambda key, held: (seen.append((key, held)), residency.changed(CPU, key, held)),
    )
    index["a"] = index["b"] = index["c"] = 1
    del index["a"]
    assert index.pop("b") == 1
    assert index.pop("b", None) is None
    with pytest.raises(KeyError):
        index.pop("b")
    assert index.get("c") == 1
    assert residency.take() == [
        *changes(CPU, ["a", "b", "c"]),
        *changes(CPU, ["a", "b"], held=False),
    ]
    assert len(index) == 1


ROOM = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("tiers"), chunks=2, pool_chunks=ROOM, hot=True)
    yield engine
    engine.close()


def ask(engine: Engine, prompt: list[int], step: int) -> None:
    """Look a prompt up, and store what it lacks in steps, as an engine does that computes it."""
    keys = [make_key(number) for number in prompt]
    held = engine.pool.batched_contains(keys, pin=True)
    engine.pool.touch_cache()
    for key in keys[:held]:
        engine.pool.hot_cache[key].unpin()
    for first in range(held, len(keys), step):
        part = slice(first, min(first + step, len(keys)))
        engine.manager.batched_put(keys[part], [engine.allocate(content(n)) for n in prompt[part]])
        engine.settle()  # what is being written to the disk can't be evicted


def usable(engine: Engine, prompt: list[int]) -> int:
    return engine.pool.batched_contains([make_key(number) for number in prompt])


@pytest.mark.parametrize("step", [1, 4, 15])
def test_a_prompt_loses_its_end_first(engine, step):
    engine.pool.clear()
    old, new = list(range(15)), list(range(100, 104))
    ask(engine, old, step)
    ask(engine, new, 2)
    assert usable(engine, old) == ROOM - len(new)
    assert usable(engine, new) == len(new)


PROMPTS = [[*range(10), *range(at, at + 5)] for at in (50, 60)] + [list(range(70, 82))]


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.integers(1, 15), st.integers(1, 6)), max_size=8
    )
)
def test_what_is_held_of_a_prompt_is_its_beginning(engine, asked):
    engine.pool.clear()
    for prompt, length, step in asked:
        ask(engine, prompt[:length], step)
        for other in PROMPTS:
            held = [make_key(number) in engine.pool.hot_cache for number in other]
            assert held == sorted(held, reverse=True), (asked, other)
