"""Where the chunks of a hit are: what workers ask this package's module of LMCache's server.

    align     chunks have to be whole blocks: older LMCache can't round them up
    register  which KV cache groups an engine has: older LMCache knows one alone
    locate    where the chunks of a hit are; `release` ends reading them
    reserve   where to store chunks, with the tokens that name them; `commit` ends writing them

A question names the request, whose tokens the server has since its look-up, and the range of
tokens. The answer is of each object a few numbers. See `server_module` and `server_places`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from lmcache_xpu.errors import TransferError

ALIGN, REGISTER, LOCATE, RELEASE, RESERVE, COMMIT = (
    f"lmcache_xpu.{name}_v4"
    for name in ("align", "register", "locate", "release", "reserve", "commit")
)

sent = msgspec.msgpack.encode  # a message's bytes
M = TypeVar("M")
Rows = list[tuple[int, int, int, int]]  # group, chunk, offset and length of an object


class Hit(NamedTuple):
    """A range of a request's tokens, as one worker reads it once, or writes it."""

    instance_id: int  # of the worker
    number: int  # of the question; a worker asks each once, and ends each once
    request_id: str  # as the next six, of LMCache's key
    model_name: str
    world_size: int
    cache_salt: str
    worker_id: int | None
    start: int  # first token
    end: int  # the one after the last
    windows: tuple[int, ...]  # by KV cache group, chunks that a hit needs of its end; 0 for all

    @classmethod
    def of_key(cls, instance_id: int, number: int, key: Any, windows: Sequence[int] = (0,)) -> Self:
        """Return what LMCache's key names."""
        names = (getattr(key, name) for name in cls._fields[2:-1])
        return cls._make((instance_id, number, *names, tuple(windows)))


class Reservation(NamedTuple):
    """Chunks that a worker wants to store."""

    hit: Hit  # their range
    sizes: tuple[int, ...]  # by KV cache group, bytes of an object
    skipped: tuple[tuple[int, ...], ...]  # by group, chunks that the worker does not have
    tokens: bytes | tuple[int, ...]  # as LMCache's keys have them: numbers, or packed


class Groups(NamedTuple):
    """The KV cache groups of an engine, as one of its workers registers them."""

    instance_id: int  # of the worker
    model_name: str  # as the next, of LMCache's keys
    world_size: int
    sizes: tuple[int, ...]  # by group, bytes of an object; none where the worker ends
    windows: tuple[int, ...]  # as of `Hit`


@dataclass(frozen=True, slots=True)
class ObjectSlots:
    """Objects in the memory that a cache lends."""

    rows: Rows  # sorted; chunks counted from the range's first one, offsets and lengths in bytes

    @classmethod
    def of(cls, rows: Rows, groups: int) -> Self:
        """Return objects, named in any order; TransferError if not all are of so many groups."""
        if any(not 0 <= group < groups for group, *_ in rows):
            named = sorted({group for group, *_ in rows})
            raise TransferError(f"objects of groups {named}", f"of {groups} groups")
        return cls(sorted(rows))

    def of_group(self, group: int) -> list[tuple[int, int]]:
        """Offsets and lengths of a group's objects."""
        return [(offset, length) for number, _, offset, length in self.rows if number == group]

    def chunks(self, group: int) -> list[int]:
        """The chunks of a group."""
        return [chunk for number, chunk, *_ in self.rows if number == group]


def needed_chunks(count: int, windows: Sequence[int]) -> list[range]:
    """Return by KV cache group the chunks that a hit of so many needs; `windows` as of `Hit`."""
    return [range(max(0, count - window) if window else 0, count) for window in windows]


def received(payload: bytes, kind: type[M]) -> M:
    """Return the message of a kind that was sent; TransferError if these bytes are none."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"a message that can't be read ({error})", f"a {kind}") from error
