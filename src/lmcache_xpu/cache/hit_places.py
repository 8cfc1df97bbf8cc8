"""What workers ask this package's module of LMCache's server, and how it is sent.

    align     chunks have to be whole blocks: older LMCache can't round them up
    register  which KV cache groups an engine has: older LMCache is told of one alone
    locate    where the chunks of a hit are; `release` ends reading them
    reserve   where to store chunks, with the tokens that name them; `commit` ends writing them

A question names the request, whose tokens the server has since its look-up, and the range of
tokens. The answer is of each object a few numbers. See `server_module` and `load_questions`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

__all__ = [
    "ALIGN",
    "COMMIT",
    "EVICTION_POLICY",
    "EVICTION_WATERMARK",
    "HELLO",
    "LOCATE",
    "REGISTER",
    "RELEASE",
    "RESERVE",
    "Groups",
    "Hit",
    "Reservation",
    "needed_chunks",
    "rows_of",
    "sent_rows",
]

HELLO, ALIGN, REGISTER, LOCATE, RELEASE, RESERVE, COMMIT = (
    f"lmcache_xpu.{name}_v3"
    for name in ("hello", "align", "register", "locate", "release", "reserve", "commit")
)

# LMCache's own eviction is off, see `room`: a policy that names nothing, at a usage that can't be.
EVICTION_POLICY, EVICTION_WATERMARK = "noop", 2.0


class Hit(NamedTuple):
    """A range of a request's tokens, as one worker reads it once, or writes it.

    Args:
        instance_id: of the worker.
        number: of the question; a worker asks each once, and ends each once.
        request_id: ID of the request.
        model_name, world_size, cache_salt, worker_id: of LMCache's key.
        start: first token.
        end: the one after the last.
        windows: by KV cache group, chunks at the end of the range that a hit needs; 0 for all.
    """

    instance_id: int
    number: int
    request_id: str
    model_name: str
    world_size: int
    cache_salt: str
    worker_id: int | None
    start: int
    end: int
    windows: tuple[int, ...]

    @classmethod
    def of_key(cls, instance_id: int, number: int, key: Any, windows: Sequence[int] = (0,)) -> Self:
        """Return what LMCache's key names."""
        names = (getattr(key, name) for name in cls._fields[2:-1])
        return cls._make((instance_id, number, *names, tuple(windows)))

    @classmethod
    def received(cls, payload: bytes) -> Self:
        """Return what was sent."""
        *fields, windows = json.loads(payload)
        return cls._make((*fields, tuple(windows)))

    def sent(self) -> bytes:
        """Return its bytes."""
        return json.dumps(self).encode()

    def chunks(self, chunk_tokens: int) -> list[range]:
        """Return by group the chunks that a hit needs, counted from the range's first one."""
        return needed_chunks((self.end - self.start) // chunk_tokens, self.windows)


class Reservation(NamedTuple):
    """Chunks that a worker wants to store.

    Args:
        hit: their range.
        sizes: by KV cache group, bytes of an object.
        skipped: by group, chunks that the worker does not have.
        tokens: of the request, as LMCache's keys have them: numbers, or packed.
    """

    hit: Hit
    sizes: tuple[int, ...]
    skipped: tuple[tuple[int, ...], ...]
    tokens: Any

    @classmethod
    def received(cls, payload: bytes) -> Self:
        """Return what was sent."""
        head, _, tokens = payload.partition(b"\n")
        hit, sizes, skipped, is_packed = json.loads(head)
        return cls(
            Hit.received(json.dumps(hit).encode()),
            tuple(sizes),
            tuple(map(tuple, skipped)),
            tokens if is_packed else tuple(array("Q", tokens)),
        )

    def sent(self) -> bytes:
        """Return its bytes."""
        is_packed = isinstance(self.tokens, bytes)
        head = json.dumps([self.hit, self.sizes, self.skipped, is_packed]).encode()
        # A number that stands for an image has 64 bits.
        return head + b"\n" + (self.tokens if is_packed else array("Q", self.tokens).tobytes())


class Groups(NamedTuple):
    """The KV cache groups of an engine, as one of its workers registers them.

    Args:
        instance_id: of the worker.
        model_name, world_size: of LMCache's keys.
        sizes: by group, bytes of an object; none where the worker ends.
        windows: by group, chunks at the end of a hit that it needs; 0 for all.
    """

    instance_id: int
    model_name: str
    world_size: int
    sizes: tuple[int, ...]
    windows: tuple[int, ...]

    @classmethod
    def received(cls, payload: bytes) -> Self:
        """Return what was sent."""
        *names, sizes, windows = json.loads(payload)
        return cls._make((*names, tuple(sizes), tuple(windows)))

    def sent(self) -> bytes:
        """Return its bytes."""
        return json.dumps(self).encode()


def needed_chunks(count: int, windows: Sequence[int]) -> list[range]:
    """Return by KV cache group the chunks that a hit needs.

    Args:
        count: chunks of the hit.
        windows: by group, chunks at its end; 0 for all.
    """
    return [range(max(0, count - window) if window else 0, count) for window in windows]


def sent_rows(rows: Iterable[Sequence[int]]) -> bytes:
    """Return the bytes of rows of numbers."""
    return array("q", [number for row in rows for number in row]).tobytes()


def rows_of(payload: bytes) -> list[tuple[int, int, int, int]]:
    """Return rows that were sent: group, chunk, offset and length of an object, in this order."""
    numbers = iter(array("q", payload).tolist())
    return sorted(zip(numbers, numbers, numbers, numbers, strict=True))
