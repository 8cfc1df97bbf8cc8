"""Promised loads, until the workers are told of them."""

from __future__ import annotations

import pytest

from lmcache_xpu.connector.request_guard import NOTHING_UNSERVED, Promises

BLOCKS = list(range(10, 30))


def promised(*, waits: bool, block_tokens: int | None = 16) -> Promises:
    promises = Promises(block_tokens)
    promises.promise("a", 40, waits=waits)  # two blocks and a half are vLLM's own
    promises.allocated("a", BLOCKS, 60)
    return promises


def test_a_load_that_is_described_is_no_failure():
    promises = promised(waits=False)
    assert promises.describe() is NOTHING_UNSERVED
    promises.fail(["a"])  # in a later step: the workers know of the load
    assert promises.describe() == (frozenset(), {})
    assert promises.broken == {"a"}


@pytest.mark.parametrize("waits", [False, True])
def test_a_load_that_is_not_described_leaves_its_blocks_unfilled(waits: bool):
    promises = promised(waits=waits)
    promises.fail(["a"])
    unfilled = frozenset(BLOCKS[2:7])
    unserved = promises.describe()
    assert unserved == ((frozenset(), {"a": unfilled}) if waits else (unfilled, {}))
    assert promises.describe() is NOTHING_UNSERVED  # told once
    promises.finished("a")
    assert promises.broken == frozenset()


def test_with_a_step_all_loads_of_it_fail_and_those_that_begin_to_wait():
    promises = promised(waits=True)
    promises.fail_step(["b"])
    assert promises.describe().waiting.keys() == {"a"}
    assert promises.broken == {"a", "b"}


def test_of_several_groups_the_request_alone_is_told():
    promises = promised(waits=True, block_tokens=None)
    promises.fail(["a"])
    assert promises.describe() == (frozenset(), {"a": frozenset()})


def test_a_request_without_a_load_leaves_nothing_unfilled():
    promises = Promises(16)
    promises.allocated("a", BLOCKS, 0)
    promises.fail(["a"])
    assert promises.describe() == (frozenset(), {})
