"""How a worker asks LMCache's server where chunks are, or may be stored; see `CachePlaces`.

A server that `serve`, Compose or the chart starts has a module of this package, whose answer comes
sooner, and which knows several KV cache groups (see `server_module`). Any other server is asked as
LMCache asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lmcache_xpu.cache.hit_places import (
    COMMIT,
    HELLO,
    LOCATE,
    REGISTER,
    RELEASE,
    RESERVE,
    Groups,
    Hit,
    ObjectSlots,
    Reservation,
    Rows,
    received,
    sent,
)
from lmcache_xpu.cache.protocol import Answer, CachePlaces, Skipped
from lmcache_xpu.cache.server import LentMemory
from lmcache_xpu.errors import SettingsError, TransferError
from lmcache_xpu.versions.lmcache_server import ServerModuleCallRequest

__all__ = ["HELLO_S", "LMCacheQuestions", "ModuleQuestions", "Question", "questions_of"]

HELLO_S = 1.0  # a server without any module is silent
T = TypeVar("T")


class Question(NamedTuple):
    """A cache is asked where chunks are that it has promised.

    Args:
        number: of the question.
        key: of the chunks.
        memory: that the cache lent when it was asked.
        begun: when it was asked.
        answer: that comes.
        places: who was asked.
    """

    number: int
    key: Any
    memory: LentMemory
    begun: float
    answer: Answer[ObjectSlots | None]
    places: CachePlaces

    def is_answered(self, within_s: float) -> bool:
        """Whether the cache has answered; waits for it."""
        return self.answer.wait(within_s)


class LMCacheQuestions:
    """LMCache's own questions, for one KV cache group, of which the worker has all chunks.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
    """

    is_sealed = True

    def __init__(self, client: Any, instance_id: int | None) -> None:
        self._client, self._instance_id = client, instance_id

    def locate(self, number: int, key: Any) -> Answer[ObjectSlots | None]:
        """Ask where chunks are; the server looks the tokens up again."""
        return _Coming(
            self._client.prepare_retrieve(key, self._instance_id),
            lambda answer: read_slots(answer.context) if answer.success else None,
        )

    def release(self, number: int, key: Any) -> None:
        """End reading; waits for nothing."""
        self._client.commit_retrieve(key, self._instance_id)

    def reserve(self, number: int, key: Any, skipped: Skipped) -> Answer[ObjectSlots]:
        """Ask where to store chunks."""
        asked = self._client.prepare_store(key, self._instance_id)
        return _Coming(asked, lambda answer: read_slots(answer.context))

    def commit(self, number: int, key: Any) -> Answer[bool]:
        """End writing."""
        return _Coming(self._client.commit_store(key, self._instance_id, b""), bool)

    def give_up(self, number: int) -> None:
        """Do nothing: the server takes memory back whose lease is over."""


class ModuleQuestions:
    """By this package's module in the server.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
        sizes: by KV cache group, bytes of an object.
        windows: by group, chunks at the end of a hit that it needs; 0 for all.
    """

    is_sealed = True

    def __init__(
        self, client: Any, instance_id: int, sizes: Sequence[int], windows: Sequence[int]
    ) -> None:
        self._client, self._instance_id = client, instance_id
        self._sizes, self._windows = tuple(sizes), tuple(windows)

    def locate(self, number: int, key: Any) -> Answer[ObjectSlots | None]:
        """Ask where chunks are."""
        return _Coming(
            self._call(LOCATE, number, key),
            lambda answer: self._slots(answer) if answer.success and answer.payload else None,
        )

    def release(self, number: int, key: Any) -> None:
        """End reading; waits for nothing."""
        self._call(RELEASE, number, key)

    def reserve(self, number: int, key: Any, skipped: Skipped) -> Answer[ObjectSlots]:
        """Ask where to store chunks: nowhere if the server fails."""
        tokens = getattr(key, "token_bytes", None)  # of newer LMCache
        tokens = key.token_ids if tokens is None else tokens
        without = tuple(map(tuple, skipped))
        asked = Reservation(self._hit(number, key), self._sizes, without, tokens)
        return _Coming(self._send(RESERVE, sent(asked)), self._slots)

    def commit(self, number: int, key: Any) -> Answer[bool]:
        """End writing."""
        asked = self._call(COMMIT, number, key)
        return _Coming(asked, lambda answer: bool(answer.success and answer.payload))

    def give_up(self, number: int) -> None:
        """Do nothing: the server takes memory back whose lease is over."""

    def register(self, model_name: str, world_size: int, *, ends: bool = False) -> Any:
        """Name the groups of an engine's keys to the server, or none where the worker ends.

        Returns:
            LMCache's future.
        """
        names = self._instance_id, model_name, world_size
        groups = Groups(*names, () if ends else self._sizes, self._windows)
        return self._send(REGISTER, sent(groups))

    def _slots(self, answer: Any) -> ObjectSlots:
        rows = received(answer.payload, Rows) if answer.success else []
        return ObjectSlots.of(rows, len(self._sizes))

    def _hit(self, number: int, key: Any) -> Hit:
        return Hit.of_key(self._instance_id, number, key, self._windows)

    def _call(self, method: str, number: int, key: Any) -> Any:
        return self._send(method, sent(self._hit(number, key)))

    def _send(self, method: str, payload: bytes) -> Any:
        return self._client.server_module_call(ServerModuleCallRequest(method, payload))


class _Coming(Answer[T]):
    """An answer of the server.

    Args:
        future: LMCache's.
        read: makes the answer of what the future brings.
    """

    def __init__(self, future: Any, read: Callable[[Any], T]) -> None:
        self._future, self._read = future, read

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._future.wait(timeout))

    def result(self, timeout: float | None = None) -> T:
        return self._read(self._future.result(timeout=timeout))


def read_slots(context: Mapping[str, Any]) -> ObjectSlots:
    """Read LMCache's answer, of one group; it names chunks, or it names all.

    Raises:
        TransferError: an answer of another form.
    """
    try:
        slots = [(int(slot["offset"]), int(slot["length"])) for slot in context["slots"]]
        numbers = [int(n) for n in context.get("chunk_indices", range(len(slots)))]
        rows = [(0, n, *slot) for n, slot in zip(numbers, slots, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"an answer of LMCache's server {context!r:.200}", "slots") from error
    return ObjectSlots.of(rows, 1)


def questions_of(
    client: Any,
    instance_id: int,
    sizes: Sequence[int],
    windows: Sequence[int],
    timeout_s: float,
) -> LMCacheQuestions | ModuleQuestions:
    """Return how a server is asked; waits `HELLO_S` at most for it to say if it has the module.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
        sizes, windows, timeout_s: see `Cache.places`.

    Raises:
        SettingsError: several groups, and a server without the module.
    """
    said = client.server_module_call(ServerModuleCallRequest(HELLO, b""))
    if said.wait(min(timeout_s, HELLO_S)) and said.result(timeout=0).success:
        return ModuleQuestions(client, instance_id, sizes, windows)
    if len(sizes) > 1:
        raise SettingsError(
            "a model with windows or states, and an LMCache server without this package's module",
            "one with it, of the same version",
            "Leave server_url unset and `lmcache-xpu serve` starts one, or start yours with "
            "`lmcache-xpu-server`.",
        )
    return LMCacheQuestions(client, instance_id)
