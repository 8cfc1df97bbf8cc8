from __future__ import annotations

import threading
import time

import pytest
from support.lending import succeeds

from lmcache_xpu.copies.transfer_queue import Transfer, TransferQueue


@pytest.fixture
def queue():
    queue = TransferQueue("test", lambda *_: None)
    yield queue
    queue.close()


def transfer(blocks=(1, 2)):
    return Transfer("request", frozenset(blocks))


def soon():
    return time.monotonic() + 0.02


def test_transfers_are_done_one_after_another_and_tell_how_they_ended(queue):
    first, second, order = transfer(), transfer(), []
    queue.add(first, lambda: time.sleep(0.05), lambda: order.append(1), lambda: 1 / 0)
    queue.add(second, lambda: order.append(2))
    assert succeeds(second)
    assert not succeeds(first)
    assert order == [1, 2]
    assert not queue.transfers()


def test_one_that_has_not_begun_ends_when_its_blocks_are_needed(queue):
    waits, stored, began = threading.Event(), transfer(), []
    queue.add(stored, lambda: waits.wait(5), lambda: began.append(stored.begin_copying()))
    stored.leave_blocks(soon())
    assert stored.is_cancelled
    assert stored.result is None  # nothing of it is on its way when this is done
    waits.set()
    assert succeeds(stored)
    assert began == [False]


def test_one_that_copies_is_waited_for_until_its_copies_are_enqueued(queue):
    begun, goes_on, stored, seen = threading.Event(), threading.Event(), transfer(), []

    class Event:
        def wait(self):
            seen.append("the engine's stream waits")

    def copy():
        assert stored.begin_copying()
        begun.set()
        goes_on.wait(5)
        seen.append("copied")
        stored.enqueued([Event()])

    queue.add(stored, copy)
    begun.wait(5)
    threading.Timer(0.1, goes_on.set).start()
    stored.leave_blocks(time.monotonic())
    assert seen == ["copied", "the engine's stream waits"]
    assert succeeds(stored)


def test_an_error_leaves_nobody_waiting(queue):
    stored = transfer()

    def fail():
        assert stored.begin_copying()
        raise RuntimeError("planted")

    queue.add(stored, fail)
    stored.leave_blocks(soon())
    assert not succeeds(stored)


def test_closing_ends_what_has_not_begun():
    queue, waits, first, second = (
        TransferQueue("test", print),
        threading.Event(),
        transfer(),
        transfer(),
    )
    queue.add(first, lambda: waits.wait(5))
    queue.add(second, lambda: True)
    threading.Timer(0.05, waits.set).start()
    queue.close()
    assert first.result is True
    assert second.result is False
