"""PinnedUploads: every tensor arrives, and none is overwritten before it has."""

from __future__ import annotations

import pytest
import torch
from support import caches
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture

from lmcache_xpu.transfer import host_copies
from lmcache_xpu.transfer.host_copies import PinnedUploads


class SlowEvent:
    """An event that is reached when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.done = False

    def record(self) -> None:
        """As of a real one."""

    def reached(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def pending(monkeypatch) -> PinnedUploads:
    """A ring of 8 numbers whose copies last until somebody waits for them."""
    monkeypatch.setattr(host_copies, "Event", SlowEvent)
    monkeypatch.setattr(host_copies, "is_host", lambda device: False)
    if caches.DEVICE == "cpu":
        monkeypatch.setattr(torch, "empty", _unpinned(torch.empty))
    return PinnedUploads(torch.device(caches.DEVICE), 64)


def _unpinned(empty):
    return lambda *shape, pin_memory=False, **more: empty(*shape, **more)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64)


@MACHINES
def test_what_is_uploaded_is_what_was_given():
    upload = PinnedUploads(torch.device(caches.DEVICE), 4096)
    uploads = [torch.randint(0, 99, (2, size)) for size in (1, 3, 100, 7, 0, 200, 250, 5, 5000)]
    there = [upload(tensor) for tensor in uploads]
    assert all(copy.device.type == caches.DEVICE for copy in there)
    for tensor, copy in zip(uploads, there, strict=True):
        assert torch.equal(copy.cpu(), tensor)


def test_room_is_taken_only_from_copies_that_are_done(pending):
    for size, waiting in [
        (2, 1),  # 0:2
        (2, 2),  # 2:4
        (3, 3),  # 4:7
        (2, 3),  # 0:2, over the first: behind 7 there is no room
        (4, 2),  # 2:6, over the second and the third
    ]:
        before = list(pending._copies)
        pending(numbers(size))
        new = pending._copies[-1]
        for copy in before:
            if copy.start < new.end and new.start < copy.end:
                assert copy.done.done
        assert new.end <= 8
        assert len(pending._copies) <= waiting


def test_room_behind_the_last_copy_is_skipped_with_the_copies_in_it(pending):
    """The oldest copy lies in the part that is skipped, and the ones to wait for are younger."""
    pending(numbers(6))  # 0:6
    pending(numbers(2))  # 6:8
    pending(numbers(4))  # 0:4
    pending(numbers(3))  # 4:7, over the first one of 6:8
    young = pending._copies[-2]
    assert (young.start, young.end) == (0, 4)
    pending(numbers(2))  # 0:2
    assert young.done.done


def test_more_than_the_ring_goes_its_own_way(pending):
    assert torch.equal(pending(numbers(9)).cpu(), numbers(9))
    assert not pending._copies
