"""Host memory that was looked at, and staging memory. Copies are tested with the stager."""

from __future__ import annotations

import pytest
import torch

from lmcache_xpu.transfer import host_copies
from lmcache_xpu.transfer.host_copies import LENT, Buffer, HostCopies, StagingRing
from lmcache_xpu.transfer.plan import HostMemory
from lmcache_xpu.transfer.tuning import TUNING

CPU = torch.device("cpu")
SIZE = 256  # of a piece that is as large as memory is aligned


def test_memory_is_looked_at_once(monkeypatch):
    answers = [True]
    monkeypatch.setattr(host_copies, "register_host", lambda *_: answers.pop(0))
    copies = HostCopies(CPU)
    pool = torch.empty(TUNING.pool_bytes, dtype=torch.uint8)
    assert copies.pinned(HostMemory([pool[:64]]))
    assert copies.pinned(HostMemory([pool[64:]]))
    assert answers == []


def test_memory_that_a_cache_lends_is_as_its_owner_says_and_looked_at_anew(monkeypatch):
    """Another server's may come to its place."""
    monkeypatch.setattr(host_copies, "register_host", lambda *_: pytest.fail("its owner pins it"))
    copies = HostCopies(CPU)
    pool = torch.empty(TUNING.pool_bytes, dtype=torch.uint8)
    for pinned in (True, False):
        monkeypatch.setitem(LENT, pool.data_ptr(), pinned)
        assert copies.pinned(HostMemory([pool[64:]])) is pinned


class Free:
    """Notes that somebody waited until a piece was free."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number = number
        self.waited = waited

    def wait(self) -> None:
        self.waited.append(self.number)


def taken(ring: StagingRing, *sizes: int) -> tuple[list[Buffer], list[int]]:
    """Pieces of these sizes, and the numbers of those that others waited for."""
    waited: list[int] = []
    buffers = []
    for number, size in enumerate(sizes):
        buffers.append(ring.take(size))
        ring._used[-1] = ring._used[-1]._replace(free=Free(number, waited))
    return buffers, waited


@pytest.mark.parametrize(
    ("sizes", "starts", "waited"),
    [
        ((2, 2), (0, 2), []),
        ((2, 2, 1), (0, 2, 0), [0]),
        ((1, 1, 1, 1, 2), (0, 1, 2, 3, 0), [0, 1]),
        # The end is left out where a piece does not fit there.
        ((2, 1, 2, 2), (0, 2, 0, 2), [0, 1]),
    ],
)
def test_pieces_wait_for_those_that_had_their_memory(sizes, starts, waited):
    buffers, waited_for = taken(StagingRing(2 * SIZE, 2, CPU), *(size * SIZE for size in sizes))
    assert [buffer.start for buffer in buffers] == [start * SIZE for start in starts]
    assert [buffer.memory.nbytes for buffer in buffers] == [size * SIZE for size in sizes]
    assert waited_for == waited


def test_pieces_that_are_there_at_once_share_no_byte():
    buffers, _ = taken(StagingRing(SIZE, 3, CPU), 100, SIZE, 7)
    for number, buffer in enumerate(buffers):
        buffer.memory.fill_(number)
    assert all(bool(buffer.memory.eq(number).all()) for number, buffer in enumerate(buffers))


def test_a_piece_of_no_bytes_has_its_turn():
    sizes = [SIZE, 0, SIZE, 0, SIZE]
    buffers, waited = taken(StagingRing(SIZE, 2, CPU), *sizes)
    assert [buffer.start for buffer in buffers] == [0, SIZE, 0, SIZE, 0]
    assert waited == [0, 1, 2]
