"""Where chunks are, or may be stored: how LMCache's server is asked, and what it answers.

A server that `serve`, Compose or the chart starts has a module of this package, whose answer comes
sooner, and which knows several KV cache groups (see `server_module`). Any other server is asked as
LMCache asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lmcache_xpu.cache.hit_places import (
    COMMIT,
    HELLO,
    LOCATE,
    REGISTER,
    RELEASE,
    RESERVE,
    Groups,
    Hit,
    Reservation,
    rows_of,
)
from lmcache_xpu.cache.lent_memory import LentMemory
from lmcache_xpu.cache.object_slots import ObjectSlots
from lmcache_xpu.cache.server_client import HELLO_S
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.versions.lmcache_server import ServerModuleCallRequest

__all__ = ["LMCacheQuestions", "LoadQuestions", "ModuleQuestions", "Question", "questions_of"]


class LoadQuestions(Protocol):
    """One way to ask. No call waits; each returns a future of LMCache's, but those that end.

    Attributes:
        is_sealed: objects have seals, see `seals`: others write to the memory too.
    """

    is_sealed: bool

    def ask(self, number: int, key: Any) -> Any:
        """Ask where the chunks of LMCache's key are.

        Args:
            number: of the question, which no other has.
            key: LMCache's.
        """

    def slots(self, answer: Any) -> ObjectSlots | None:
        """Return what an answer names; None if the server lacks a chunk.

        Raises:
            TransferError: an answer of another form.
        """

    def end(self, number: int, key: Any) -> None:
        """Tell the server that nothing is read any more of what a question has named."""

    def reserve(self, number: int, key: Any, skipped: Sequence[Sequence[int]]) -> Any:
        """Ask where to store the chunks of a key, but by group those that the worker lacks."""

    def reserved(self, answer: Any) -> ObjectSlots:
        """Return what an answer names; nothing of chunks that are there.

        Raises:
            TransferError: an answer of another form.
        """

    def commit(self, number: int, key: Any) -> Any:
        """Tell the server that what a question has named is written."""

    def give_up(self, number: int) -> None:
        """Forget what a question has named: it will not be written."""

    def is_committed(self, answer: Any) -> bool:
        """Whether the server took it."""


class LMCacheQuestions:
    """LMCache's own way, for one KV cache group.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
    """

    is_sealed = True

    def __init__(self, client: Any, instance_id: int) -> None:
        self._client, self._instance_id = client, instance_id

    def ask(self, number: int, key: Any) -> Any:
        """Ask; the server looks the tokens up again."""
        return self._client.prepare_retrieve(key, self._instance_id)

    def slots(self, answer: Any) -> ObjectSlots | None:
        """Return what an answer names."""
        return ObjectSlots.read(answer.context) if answer.success else None

    def end(self, number: int, key: Any) -> None:
        """Tell the server that reading has ended."""
        self._client.commit_retrieve(key, self._instance_id)

    def reserve(self, number: int, key: Any, skipped: Sequence[Sequence[int]]) -> Any:
        """Ask; the worker has all chunks."""
        return self._client.prepare_store(key, self._instance_id)

    def reserved(self, answer: Any) -> ObjectSlots:
        """Return what an answer names."""
        return ObjectSlots.read(answer.context)

    def commit(self, number: int, key: Any) -> Any:
        """Tell the server that writing has ended."""
        return self._client.commit_store(key, self._instance_id, b"")

    def give_up(self, number: int) -> None:
        """Do nothing: the server takes memory back whose lease is over."""

    def is_committed(self, answer: Any) -> bool:
        """Whether the server took it."""
        return bool(answer)


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

    def ask(self, number: int, key: Any) -> Any:
        """Ask."""
        return self._call(LOCATE, number, key)

    def slots(self, answer: Any) -> ObjectSlots | None:
        """Return what an answer names."""
        return self.reserved(answer) if answer.success and answer.payload else None

    def end(self, number: int, key: Any) -> None:
        """Tell the server that reading has ended."""
        self._call(RELEASE, number, key)

    def reserve(self, number: int, key: Any, skipped: Sequence[Sequence[int]]) -> Any:
        """Ask."""
        tokens = getattr(key, "token_bytes", None)  # of newer LMCache
        tokens = key.token_ids if tokens is None else tokens
        without = tuple(map(tuple, skipped))
        asked = Reservation(self._hit(number, key), self._sizes, without, tokens)
        return self._send(RESERVE, asked.sent())

    def reserved(self, answer: Any) -> ObjectSlots:
        """Return what an answer names; nothing if the server failed."""
        rows = rows_of(answer.payload) if answer.success else []
        return ObjectSlots.of_rows(rows, len(self._sizes))

    def commit(self, number: int, key: Any) -> Any:
        """Tell the server that writing has ended."""
        return self._call(COMMIT, number, key)

    def give_up(self, number: int) -> None:
        """Do nothing: the server takes memory back whose lease is over."""

    def is_committed(self, answer: Any) -> bool:
        """Whether the server took it."""
        return bool(answer.success and answer.payload)

    def register(self, model_name: str, world_size: int, *, ends: bool = False) -> Any:
        """Tell the server which groups an engine's keys have, or that the worker ends."""
        names = self._instance_id, model_name, world_size
        groups = Groups(*names, () if ends else self._sizes, self._windows)
        return self._send(REGISTER, groups.sent())

    def _hit(self, number: int, key: Any) -> Hit:
        return Hit.of_key(self._instance_id, number, key, self._windows)

    def _call(self, method: str, number: int, key: Any) -> Any:
        return self._send(method, self._hit(number, key).sent())

    def _send(self, method: str, payload: bytes) -> Any:
        return self._client.server_module_call(ServerModuleCallRequest(method, payload))


class Question(NamedTuple):
    """The server is asked where chunks are that it has promised.

    Args:
        number: of the question.
        key: LMCache's, of the chunks.
        memory: that the server lent when it was asked.
        begun: when it was asked.
        answer: LMCache's future.
        way: in which it was asked.
    """

    number: int
    key: Any
    memory: LentMemory
    begun: float
    answer: Any
    way: LoadQuestions

    def is_answered(self, within_s: float) -> bool:
        """Whether the server has answered; waits for it."""
        return bool(self.answer.wait(within_s))


def questions_of(
    client: Any,
    instance_id: int,
    sizes: Sequence[int],
    windows: Sequence[int],
    timeout_s: float,
) -> LMCacheQuestions | ModuleQuestions:
    """Return how a server is asked; waits for it to say whether it has the module.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
        sizes: by KV cache group, bytes of an object.
        windows: by group, chunks at the end of a hit that it needs; 0 for all.
        timeout_s: that it has for that, `HELLO_S` at most.

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
