"""The engine of a rank that uses another one's CPU tier: what it promises, loads and gives back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_xpu.cache_engine.engine import CacheEngine


class Borrowing(CacheEngine):
    """A rank's engine that borrows, and whatever it is told."""

    def __init__(self, borrowed: Any) -> None:
        self.refuses_lookups = False
        self.lender = None
        self.borrower = SimpleNamespace(borrow=lambda order, request: borrowed(order, request))
        self.moved: list[Any] = []
        self.failed: list[Any] = []
        self.gpu_connector = SimpleNamespace(batched_to_gpu=self.move)
        self.unfilled = SimpleNamespace(add_load=lambda *args: self.failed.append(args))

    def move(self, objs: Any, starts: Any, ends: Any, **arguments: Any) -> None:
        self.moved.append((list(objs), list(starts), list(ends), arguments["req_id"]))


class Counted:
    """Memory that was borrowed."""

    def __init__(self) -> None:
        self.references = 1

    def ref_count_down(self) -> None:
        self.references -= 1


def test_a_rank_that_borrows_promises_all_unless_its_weights_are_others():
    engine = Borrowing(None)
    assert engine.lookup(hashes=[1, 2], offsets=[4, 3], lookup_id="r", pin=True) == 7
    engine.refuses_lookups = True
    assert engine.lookup(hashes=[1, 2], offsets=[4, 3], lookup_id="r", pin=True) == 0


def test_a_rank_that_borrows_stores_nothing():
    engine = Borrowing(None)
    engine.store([1, 2], slot_mapping=None)
    assert (engine.moved, engine.failed) == ([], [])


@pytest.mark.parametrize(("owner", "order"), [(None, 0), (object(), 1)])
def test_a_rank_that_borrows_loads_what_it_was_lent_and_gives_it_back(owner: Any, order: int):
    objs = [Counted(), Counted()]
    asked: list[Any] = []

    def borrow(*names: Any) -> Any:
        asked.append(names)
        return objs, [4, 8], [8, 10]

    engine = Borrowing(borrow)
    loaded = engine.retrieve(list(range(12)), None, req_id="r", load_owner=owner)
    assert loaded.tolist() == [False] * 4 + [True] * 6 + [False] * 2
    assert asked == [(order, "r")]
    assert engine.moved == [(objs, [4, 8], [8, 10], "r")]
    assert [obj.references for obj in objs] == [0, 0]


def test_what_could_not_be_borrowed_is_computed():
    def lost(*names: Any) -> Any:
        raise RuntimeError("the first rank has gone")

    engine = Borrowing(lost)
    assert not engine.retrieve([1, 2], None, req_id="r").any()
    [(error, arguments, first)] = engine.failed
    assert "has gone" in str(error)
    assert (arguments["req_id"], first) == ("r", 0)


def test_a_lent_load_ends_for_others_whatever_becomes_of_it_here():
    ended: list[Any] = []
    engine = Borrowing(None)
    engine.borrower = None
    engine.lender = SimpleNamespace(end=lambda *names: ended.append(names), settle=lambda: None)
    engine.lookup_pins = {}
    engine.token_database = None  # so that it raises
    assert not engine.retrieve([1, 2], None, req_id="r").any()
    assert ended == [(0, "r")]
    assert len(engine.failed) == 1
