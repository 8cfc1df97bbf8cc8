"""A tier forgets the end of a prompt first: its head is what makes the rest of use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lmcache")
from support.storage import Engine, content, make_key

ROOM = 16


@pytest.fixture(scope="module", params=["cpu", "disk"])
def engine(request, tmp_path_factory):
    """An engine one of whose tiers has room for as many chunks."""
    rooms = (2, ROOM) if request.param == "cpu" else (ROOM, 256)
    path = tmp_path_factory.mktemp("tiers")
    engine = Engine(path, chunks=rooms[0], pool_chunks=rooms[1], hot=request.param == "cpu")
    engine.bounded = engine.pool if request.param == "cpu" else engine.tier
    yield engine
    engine.close()


def ask(engine: Engine, prompt: list[int], step: int) -> None:
    """Look a prompt up, and store what it lacks in steps, as an engine does that computes it."""
    keys = [make_key(number) for number in prompt]
    held, blocks = engine.manager.batched_contains(keys, pin=True)
    engine.manager.touch_cache()
    for tier, part in blocks.items():
        engine.manager.batched_unpin(part, [tier])
    if held and engine.bounded is engine.tier:
        engine.load(prompt[:held])
    for first in range(held, len(keys), step):
        part = slice(first, min(first + step, len(keys)))
        engine.manager.batched_put(keys[part], [engine.allocate(content(n)) for n in prompt[part]])
        engine.settle()  # what is being written to the disk can't be evicted


def usable(engine: Engine, prompt: list[int]) -> int:
    return engine.bounded.batched_contains([make_key(number) for number in prompt])


def clear(engine: Engine) -> None:
    engine.pool.clear()
    engine.tier.clear()


@pytest.mark.parametrize("step", [1, 4, 15])
def test_a_prompt_loses_its_end_first(engine, step):
    clear(engine)
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
    clear(engine)
    for prompt, length, step in asked:
        ask(engine, prompt[:length], step)
        for other in PROMPTS:
            held = [engine.bounded.contains(make_key(number)) for number in other]
            assert held == sorted(held, reverse=True), (asked, other)
