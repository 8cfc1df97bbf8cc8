from __future__ import annotations

import pickle
import threading

import pytest

from lmcache_xpu.copies import late_blocks
from lmcache_xpu.copies.late_blocks import LateBlocks, Verdict


def decided(*, filled: bool, blocks: set[int]) -> Verdict:
    verdict = Verdict(blocks)
    verdict.give(filled=filled)
    return verdict


@pytest.fixture
def late():
    """Blocks of a load that fails, which is said only when somebody has begun to look."""
    verdict = Verdict({4, 5})
    said = threading.Timer(0.1, verdict.give, kwargs={"filled": False})
    said.start()
    yield LateBlocks([decided(filled=True, blocks={1}), verdict])
    said.join()


# What vLLM does with such a set, and its MultiConnector and aggregator.
@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (bool, True),
        (len, 2),
        (set, {4, 5}),
        (lambda late: 4 in late, True),
        (lambda late: pickle.loads(pickle.dumps(late)), {4, 5}),
        (lambda late: {9} | late, {4, 5, 9}),
        (lambda late: {4, 9} - late, {9}),
        (lambda late: late - {4}, {5}),
        (lambda late: {4, 9} & late, {4}),
        (lambda late: {9}.union(late), {4, 5, 9}),
    ],
)
def test_whoever_looks_waits_until_it_is_known(late, look, seen):
    assert look(late) == seen


def test_a_set_that_is_added_to_waits_as_well(late):
    blocks = {9}
    blocks |= late
    assert blocks == {4, 5, 9}


def test_what_was_filled_is_not_among_them():
    assert not LateBlocks([decided(filled=True, blocks={1, 2})])
    assert decided(filled=True, blocks={1}).unfilled == frozenset()


def test_what_is_never_said_counts_as_unfilled(monkeypatch):
    monkeypatch.setattr(late_blocks, "WAIT_S", 0.01)
    assert Verdict({7}).unfilled == {7}


def test_the_first_word_counts():
    verdict = decided(filled=False, blocks={1})
    verdict.give(filled=True)
    assert verdict.unfilled == {1}
