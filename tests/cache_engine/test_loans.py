"""One CPU tier for two ranks: what one lends, and what another borrows and gives back."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from support.channels import Channels

from lmcache_xpu.cache_engine.loans import LEDGER_BYTES, Borrower, Lender
from lmcache_xpu.errors import SeamError
from lmcache_xpu.transfer.pool_memory import SharedMemory

SHAPE = torch.Size([1, 2, 4, 64])
SIZE = SHAPE.numel() * 2
POOL_BYTES = 64 * 4096


class Ranks:
    """The first rank, with LMCache's allocator, and others."""

    def __init__(self, borrowers: int = 1) -> None:
        self.pool, self.ledger = SharedMemory.make(POOL_BYTES), SharedMemory.make(LEDGER_BYTES)
        self.allocator = TensorMemoryAllocator(self.pool.tensor)
        channels = Channels(borrowers)
        self.lender = Lender(channels.of_lender(), self.pool, self.ledger, borrowers)
        self.borrowers = [
            Borrower(
                channels.of(number),
                SharedMemory.open(self.pool.place),
                SharedMemory.open(self.ledger.place),
                number,
            )
            for number in range(borrowers)
        ]

    @property
    def in_use(self) -> int:
        return self.allocator.total_allocated_size

    def chunks(self, *values: int):
        """Memory that a load holds as LMCache does: one reference each."""
        objs = []
        for value in values:
            obj = self.allocator.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_MLA_FMT)
            obj.tensor.fill_(value)
            objs.append(obj)
        return objs

    def lend(self, request: str, *values: int, order: int = 0) -> None:
        """A load whose chunks LMCache holds no more when it has ended."""
        objs = self.chunks(*values)
        starts = [4 * number for number in range(len(objs))]
        if objs:
            self.lender.lend(order, request, objs, starts, [start + 4 for start in starts])
        self.lender.end(order, request)
        for obj in objs:
            obj.ref_count_down()


def values(objs) -> list[float]:
    assert all(torch.equal(obj.tensor, obj.tensor[:1, :1, :1, :1].expand(SHAPE)) for obj in objs)
    return [obj.tensor[0, 0, 0, 0].item() for obj in objs]


def give_back(objs) -> None:
    for obj in objs:
        obj.ref_count_down()


def test_a_borrower_sees_the_chunks_in_its_own_mapping():
    ranks = Ranks()
    ranks.lend("a", 3, 7)
    objs, starts, ends = ranks.borrowers[0].borrow(0, "a")
    assert values(objs) == [3, 7]
    assert (starts, ends) == ([0, 4], [4, 8])
    for obj in objs:
        assert (obj.metadata.shape, obj.metadata.dtype) == (SHAPE, torch.bfloat16)
        assert obj.metadata.fmt is MemoryFormat.KV_MLA_FMT
        assert (obj.get_size(), obj.raw_tensor.nbytes) == (SIZE, SIZE)
        assert obj.raw_tensor.data_ptr() != ranks.pool.address
        assert obj.get_ref_count() == 1


def test_chunks_stay_until_all_borrowers_have_given_them_back():
    ranks = Ranks(borrowers=2)
    ranks.lend("a", 1, 2)
    size = ranks.in_use
    assert size > 0
    for number, borrower in enumerate(ranks.borrowers):
        objs, _, _ = borrower.borrow(0, "a")
        for obj in objs:  # a copy that runs beside the engine
            obj.ref_count_up()
        give_back(objs)
        ranks.lender.settle()
        assert ranks.in_use == size
        give_back(objs[:1])
        ranks.lender.settle()
        assert ranks.in_use == size
        give_back(objs[1:])
        ranks.lender.settle()
        assert ranks.in_use == (size if number == 0 else 0)


def test_what_is_given_back_out_of_turn_goes_when_all_before_it_has():
    ranks = Ranks()
    for name in "abc":
        ranks.lend(name, 1)
    size = ranks.in_use
    loans = [ranks.borrowers[0].borrow(0, name)[0] for name in "abc"]
    for number, left in ((1, 3), (2, 3), (0, 0)):
        give_back(loans[number])
        ranks.lender.settle()
        assert ranks.in_use == size * left // 3


def test_a_rank_that_is_gone_keeps_what_it_has_borrowed():
    ranks = Ranks(borrowers=2)
    ranks.lend("a", 1)
    give_back(ranks.borrowers[0].borrow(0, "a")[0])
    for name in "bc":  # the other one takes no part any more
        ranks.lend(name, 1)
        give_back(ranks.borrowers[0].borrow(0, name)[0])
    ranks.lender.settle()
    assert ranks.in_use > 0


def test_each_load_has_word_also_one_that_finds_nothing():
    ranks = Ranks()
    for name, chunks in (("a", ()), ("b", (1,)), ("a", ()), ("c", ())):
        ranks.lend(name, *chunks)
    for name, wanted in (("a", []), ("b", [1]), ("a", []), ("c", [])):
        objs, starts, _ = ranks.borrowers[0].borrow(0, name)
        assert (values(objs), len(starts)) == (wanted, len(wanted))
        give_back(objs)
    ranks.lender.settle()
    assert ranks.in_use == 0


def test_loads_inside_steps_and_others_have_orders_of_their_own():
    ranks = Ranks()
    ranks.lend("waits", 5, order=1)
    ranks.lend("step", 6)
    for order, name, wanted in ((0, "step", 6), (1, "waits", 5)):
        objs, _, _ = ranks.borrowers[0].borrow(order, name)
        assert values(objs) == [wanted]
        give_back(objs)
    ranks.lender.settle()
    assert ranks.in_use == 0


def test_ranks_that_load_in_other_orders_are_seen():
    ranks = Ranks()
    ranks.lend("a", 1)
    with pytest.raises(SeamError, match="for a"):
        ranks.borrowers[0].borrow(0, "b")


def test_nothing_is_written_anew_that_is_still_read():
    """A small pool, from which one rank lends as fast as it can; others read slowly, and check."""
    ranks, wrong, count = Ranks(borrowers=2), [], 400

    def read(number: int) -> None:
        for turn in range(count):
            objs, _, _ = ranks.borrowers[number].borrow(0, str(turn))
            for _ in range(3):
                wanted = torch.full(SHAPE, turn % 251, dtype=torch.bfloat16)
                wrong.extend(turn for obj in objs if not torch.equal(obj.tensor, wanted))
                time.sleep(0.0001 * (number + 1))
            give_back(objs)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    full = 0
    for turn in range(count):
        while True:
            ranks.lender.settle()
            objs = [
                ranks.allocator.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_MLA_FMT)
                for _ in range(4)
            ]
            if None not in objs:
                break
            full += 1
            give_back(obj for obj in objs if obj is not None)
            time.sleep(0.0005)
        for obj in objs:
            obj.tensor.fill_(turn % 251)
        ranks.lender.lend(0, str(turn), objs, range(4), range(1, 5))
        give_back(objs)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert full > 0  # the pool was what kept it
    ranks.lender.settle()
    assert ranks.in_use == 0
