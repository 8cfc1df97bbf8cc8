"""One CPU tier for ranks that hold the same: the first of them has it, the others map its memory.

The first rank looks chunks up, fetches them and tells the others where they lie; each copies them
to its own device. It holds the chunks until every rank has said that its copies are complete: a
number that only grows, which each of them writes into memory that all have mapped. So nothing is
evicted, or written anew, that somebody still reads. A rank that dies says nothing any more: what it
borrowed stays, until the engine has ended with it.

    first rank      lend, once for each load, of whatever connector; settle, from time to time
    other ranks     borrow, once for each load, in the same order

There are two orders: of loads inside steps, and of those that requests wait for.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from lmcache_xpu.errors import SeamError
from lmcache_xpu.transfer.pool_memory import SharedMemory

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["LEDGER_BYTES", "Borrower", "Channel", "Lender", "loaded_tokens", "order_of"]

ORDERS = 2
LEDGER_BYTES = 4096
_NUMBER_BYTES = 8


class Channel(Protocol):
    """Brings messages from the first rank to the others, in their order."""

    def send(self, message: object) -> None:
        """Send to all others."""

    def receive(self) -> Any:
        """Wait for the next message."""


class _Chunk(NamedTuple):
    offset: int  # in the pool
    size: int
    shape: torch.Size
    dtype: torch.dtype
    fmt: MemoryFormat


class _Message(NamedTuple):
    number: int
    request: str
    chunks: list[_Chunk]
    starts: list[int]
    ends: list[int]


def order_of(load: Mapping[str, Any]) -> int:
    """Return which of the two orders a load is in, by LMCache's keyword arguments of it."""
    return int(load.get("load_owner") is not None)


def loaded_tokens(count: int, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """Return which of `count` tokens lie in these chunks, `[count]` bool on the host."""
    loaded = torch.zeros(count, dtype=torch.bool)
    for start, end in zip(starts, ends, strict=True):
        loaded[start:end] = True
    return loaded


def _entry(ledger: SharedMemory, rank: int, order: int) -> ctypes.c_int64:
    """Return the number up to which a rank has given back all loans of an order."""
    return ledger.number((rank * ORDERS + order) * _NUMBER_BYTES)


class Lender:
    """The first rank's half. Called by the engine's thread, and by the one that fetches.

    Args:
        channels: by order.
        pool: the memory of LMCache's CPU tier.
        ledger: what the others write.
        borrowers: number of them.
    """

    def __init__(
        self, channels: Sequence[Channel], pool: SharedMemory, ledger: SharedMemory, borrowers: int
    ) -> None:
        self._channels = channels
        self._pool = pool
        self._ledger = ledger
        self._entries = [
            [_entry(ledger, rank, order) for rank in range(borrowers)] for order in range(ORDERS)
        ]
        self._numbers = [0] * ORDERS  # of the last loan
        self._loans: list[deque[tuple[int, list[MemoryObj]]]] = [deque() for _ in range(ORDERS)]
        self._lent = threading.local()  # the request that this thread has lent for
        self._lock = threading.Lock()  # of `settle`

    def lend(
        self,
        order: int,
        request: str,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Tell the others where the chunks of a load lie, and hold them meanwhile.

        Args:
            order: of the load.
            request: its name.
            memory_objs: LMCache's memory, in the pool.
            starts, ends: of the chunks in the request.
        """
        objs = list(memory_objs)
        chunks = [self._described(obj) for obj in objs]
        for obj in objs:
            obj.ref_count_up()
        self._numbers[order] += 1
        number = self._numbers[order]
        with self._lock:
            self._loans[order].append((number, objs))
        self._lent.request = request
        self._channels[order].send(_Message(number, request, chunks, list(starts), list(ends)))

    def end(self, order: int, request: str) -> None:
        """End a load, in whatever way: others wait for word of each."""
        if getattr(self._lent, "request", None) != request:
            self.lend(order, request, (), (), ())
        self._lent.request = None

    def settle(self) -> None:
        """Let go of what all others have given back."""
        with self._lock:
            for entries, loans in zip(self._entries, self._loans, strict=True):
                returned = min(entry.value for entry in entries)
                while loans and loans[0][0] <= returned:
                    for obj in loans.popleft()[1]:
                        obj.ref_count_down()

    def _described(self, obj: MemoryObj) -> _Chunk:
        memory = obj.raw_tensor
        offset = memory.data_ptr() - self._pool.address
        size = obj.get_size()
        assert 0 <= offset <= self._pool.tensor.nbytes - size
        return _Chunk(offset, size, obj.metadata.shape, obj.metadata.dtype, obj.metadata.fmt)


class Borrower:
    """Another rank's half. Called by the engine's thread, and by the one that fetches.

    Args:
        channels: by order.
        pool: the first rank's memory, as this one has mapped it.
        ledger: what this rank writes.
        rank: its number among the borrowers.
    """

    def __init__(
        self, channels: Sequence[Channel], pool: SharedMemory, ledger: SharedMemory, rank: int
    ) -> None:
        self.pool = pool
        self._channels = channels
        self._ledger = ledger
        self._returns = [_Returns(_entry(ledger, rank, order)) for order in range(ORDERS)]
        self._numbers = [0] * ORDERS

    def borrow(self, order: int, request: str) -> tuple[list[MemoryObj], list[int], list[int]]:
        """Wait for word of a load, and return its chunks: memory, starts and ends.

        Each has one reference, the caller's. What is held longer has its own.

        Raises:
            SeamError: ranks load in different orders.
        """
        message: _Message = self._channels[order].receive()
        self._numbers[order] += 1
        loan = _Loan(self._returns[order], message.number, len(message.chunks))
        objs = [self._object(chunk, loan) for chunk in message.chunks]
        if (message.number, message.request) != (self._numbers[order], request):
            for obj in objs:
                obj.ref_count_down()
            raise SeamError(
                f"load {message.number} of the first rank, for {message.request}",
                f"load {self._numbers[order]}, for {request}: ranks load in the same order",
            )
        return objs, message.starts, message.ends

    def _object(self, chunk: _Chunk, loan: _Loan) -> MemoryObj:
        memory = self.pool.tensor[chunk.offset : chunk.offset + chunk.size]
        metadata = MemoryObjMetadata(
            shape=chunk.shape,
            dtype=chunk.dtype,
            address=chunk.offset,
            phy_size=chunk.size,
            ref_count=1,
            fmt=chunk.fmt,
            shapes=[chunk.shape],
            dtypes=[chunk.dtype],
        )
        return TensorMemoryObj(memory, metadata, loan)


class _Returns:
    """Tells the first rank up to which number all loans of an order are given back."""

    def __init__(self, entry: ctypes.c_int64) -> None:
        self._entry = entry
        self._upto = 0
        self._later: set[int] = set()
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self._later.add(number)
            while self._upto + 1 in self._later:
                self._upto += 1
                self._later.remove(self._upto)
            self._entry.value = self._upto


class _Loan:
    """Takes the place of LMCache's allocator: told when nobody has a chunk any more."""

    def __init__(self, returns: _Returns, number: int, chunks: int) -> None:
        self._returns, self._number, self._chunks = returns, number, chunks
        self._lock = threading.Lock()
        if not chunks:
            returns.add(number)

    def free(self, obj: MemoryObj) -> None:
        """Take a chunk back, once."""
        with self._lock:
            if not obj.is_valid():
                return
            obj.invalidate()
            self._chunks -= 1
            last = not self._chunks
        if last:
            self._returns.add(self._number)
