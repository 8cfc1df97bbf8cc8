from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future

import pytest

from lmcache_xpu.copies import pending_failures
from lmcache_xpu.copies.pending_failures import Outcome, PendingFailures


def outcome(blocks: set[int], *, filled: bool | None = None) -> Outcome:
    """Of a load into these blocks; undecided where `filled` is not given."""
    made = Outcome(frozenset(blocks), Future())
    if filled is not None:
        made.filled.set_result(filled)
    return made


@pytest.fixture
def pending():
    """Blocks of a load that fails, which is said only when somebody has begun to look."""
    failing = outcome({4, 5})
    said = threading.Timer(0.1, failing.filled.set_result, (False,))
    said.start()
    yield PendingFailures([outcome({1}, filled=True), failing])
    said.join()


# What vLLM does with such a set, and its MultiConnector and aggregator.
@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (bool, True),
        (len, 2),
        (set, {4, 5}),
        (lambda pending: 4 in pending, True),
        (lambda pending: pickle.loads(pickle.dumps(pending)), {4, 5}),
        (lambda pending: {9} | pending, {4, 5, 9}),
        (lambda pending: {4, 9} - pending, {9}),
        (lambda pending: pending - {4}, {5}),
        (lambda pending: {4, 9} & pending, {4}),
        (lambda pending: {9}.union(pending), {4, 5, 9}),
    ],
)
def test_whoever_looks_waits_until_it_is_known(pending, look, seen):
    assert look(pending) == seen


def test_a_set_that_is_added_to_waits_as_well(pending):
    blocks = {9}
    blocks |= pending
    assert blocks == {4, 5, 9}


def test_what_was_filled_is_not_among_them():
    assert not PendingFailures([outcome({1, 2}, filled=True)])


def test_what_is_never_said_counts_as_unfilled(monkeypatch):
    monkeypatch.setattr(pending_failures, "WAIT_S", 0.01)
    assert outcome({7}).unfilled == {7}
