"""How a worker asks this package's module of LMCache's server where the chunks of a hit are.

A question names the request, whose tokens the server has since its look-up, and the range of
tokens. The answer is of each chunk two numbers. See `server_module` and `load_questions`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

__all__ = ["HELLO", "LOCATE", "RELEASE", "Hit", "places_of", "sent_places"]

HELLO, LOCATE, RELEASE = (f"lmcache_xpu.{name}_v2" for name in ("hello", "locate", "release"))


class Hit(NamedTuple):
    """A range of a request's tokens, as one worker reads it once.

    Args:
        instance_id: of the worker.
        number: of the question; a worker asks each once, and ends each once.
        request_id: name of the request.
        model_name, world_size, cache_salt, worker_id: of LMCache's key.
        start: first token.
        end: the one after the last.
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

    @classmethod
    def of_key(cls, instance_id: int, number: int, key: Any) -> Self:
        """Return what LMCache's key names."""
        return cls(instance_id, number, *(getattr(key, name) for name in cls._fields[2:]))

    @classmethod
    def received(cls, payload: bytes) -> Self:
        """Return what was sent."""
        return cls(*json.loads(payload))

    def sent(self) -> bytes:
        """Return its bytes."""
        return json.dumps(self).encode()


def sent_places(places: Iterable[tuple[int, int]]) -> bytes:
    """Return the bytes of places: of each chunk its offset and its length."""
    return array("q", [number for place in places for number in place]).tobytes()


def places_of(payload: bytes) -> Sequence[tuple[int, int]]:
    """Return the places that were sent; none if the server lacks a chunk."""
    numbers = array("q", payload).tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))
