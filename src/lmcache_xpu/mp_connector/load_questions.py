"""Where the chunks of a hit are: how LMCache's server is asked, and what it answers.

A server that `serve`, Compose or the chart starts has a module of this package, whose answer comes
sooner (see `server_module`). Any other server is asked as LMCache asks it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from lmcache_xpu.mp_connector.hit_places import HELLO, LOCATE, RELEASE, Hit, places_of
from lmcache_xpu.mp_connector.lent_memory import LentMemory
from lmcache_xpu.mp_connector.object_slots import ObjectSlots
from lmcache_xpu.versions.lmcache_server import ServerModuleCallRequest

__all__ = ["LMCacheQuestions", "LoadQuestions", "ModuleQuestions", "Question", "questions_of"]

HELLO_S = 1.0  # a server without any module is silent


class LoadQuestions(Protocol):
    """One way to ask. None of these calls waits."""

    def ask(self, number: int, key: Any) -> Any:
        """Ask where the chunks of LMCache's key are; return a future.

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


class LMCacheQuestions:
    """LMCache's own way.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
        groups: number of KV cache groups.
    """

    def __init__(self, client: Any, instance_id: int, groups: int) -> None:
        self._client, self._instance_id, self._groups = client, instance_id, groups

    def ask(self, number: int, key: Any) -> Any:
        """Ask; the server looks the tokens up again."""
        return self._client.prepare_retrieve(key, self._instance_id)

    def slots(self, answer: Any) -> ObjectSlots | None:
        """Return what an answer names."""
        return ObjectSlots.read(answer.context, self._groups) if answer.success else None

    def end(self, number: int, key: Any) -> None:
        """Tell the server that reading has ended."""
        self._client.commit_retrieve(key, self._instance_id)


class ModuleQuestions:
    """By this package's module in the server, for one KV cache group.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
    """

    def __init__(self, client: Any, instance_id: int) -> None:
        self._client, self._instance_id = client, instance_id

    def ask(self, number: int, key: Any) -> Any:
        """Ask."""
        return self._call(LOCATE, number, key)

    def slots(self, answer: Any) -> ObjectSlots | None:
        """Return what an answer names."""
        places = tuple(places_of(answer.payload)) if answer.success else ()
        return ObjectSlots((places,), (tuple(range(len(places))),)) if places else None

    def end(self, number: int, key: Any) -> None:
        """Tell the server that reading has ended."""
        self._call(RELEASE, number, key)

    def _call(self, method: str, number: int, key: Any) -> Any:
        payload = Hit.of_key(self._instance_id, number, key).sent()
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


def questions_of(client: Any, instance_id: int, groups: int, timeout_s: float) -> LoadQuestions:
    """Return how a server is asked; waits for it to say whether it has the module.

    Args:
        client: LMCache's, of the server.
        instance_id: of the worker.
        groups: number of KV cache groups; the module serves one.
        timeout_s: that it has for that, `HELLO_S` at most.
    """
    if groups == 1:
        said = client.server_module_call(ServerModuleCallRequest(HELLO, b""))
        if said.wait(min(timeout_s, HELLO_S)) and said.result(timeout=0).success:
            return ModuleQuestions(client, instance_id)
    return LMCacheQuestions(client, instance_id, groups)
