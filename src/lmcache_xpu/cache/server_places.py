"""How a worker asks LMCache's server where chunks are, or may be stored; see `CachePlaces`.

It asks this package's module in the server (see `server_module`): its answer comes sooner than that
of LMCache's own question, and it knows several KV cache groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from lmcache_xpu.cache import hit_places
from lmcache_xpu.cache.hit_places import Groups, Hit, ObjectSlots, Reservation, Rows, received, sent
from lmcache_xpu.cache.protocol import Answer, KeyScope, Skipped, T
from lmcache_xpu.errors import SettingsError


class ServerPlaces:
    """Where the chunks of one worker are in a server; sizes and windows as of `Cache.places`."""

    is_sealed = True

    def __init__(
        self, client: Any, instance_id: int, sizes: Sequence[int], windows: Sequence[int]
    ) -> None:
        self._client, self._instance_id = client, instance_id
        self._sizes, self._windows = tuple(sizes), tuple(windows)

    def begin(self, scope: KeyScope, timeout_s: float) -> None:
        """Name the groups of an engine's keys to the server; waits for its answer.

        Raises SettingsError if the server has not this module.
        """
        named = Groups(
            self._instance_id, scope.model_name, scope.world_size, self._sizes, self._windows
        )
        registered = self._send(hit_places.REGISTER, sent(named))
        # A server without any module is silent.
        if not registered.wait(timeout_s) or not registered.result(timeout=0).success:
            raise SettingsError(
                "an LMCache server without this package's module",
                "one with it, of the same version",
                "Leave server_url unset and `lmcache-xpu serve` starts one, or start yours with "
                "`lmcache-xpu-server`.",
            )

    def leave(self) -> None:
        """Let the server forget a worker that ends; waits for nothing."""
        self._send(hit_places.REGISTER, sent(Groups(self._instance_id, "", 0, (), ())))

    def locate(self, number: int, key: Any) -> Answer[ObjectSlots | None]:
        """Ask where chunks are."""
        return _Coming(
            self._call(hit_places.LOCATE, number, key),
            lambda answer: self._slots(answer) if answer.success and answer.payload else None,
        )

    def release(self, number: int, key: Any) -> None:
        """End reading; waits for nothing."""
        self._call(hit_places.RELEASE, number, key)

    def reserve(self, number: int, key: Any, skipped: Skipped) -> Answer[ObjectSlots]:
        """Ask where to store chunks: nowhere if the server fails."""
        tokens = getattr(key, "token_bytes", None)  # of newer LMCache
        tokens = key.token_ids if tokens is None else tokens
        without = tuple(map(tuple, skipped))
        asked = Reservation(self._hit(number, key), self._sizes, without, tokens)
        return _Coming(self._send(hit_places.RESERVE, sent(asked)), self._slots)

    def commit(self, number: int, key: Any) -> Answer[bool]:
        """End writing."""
        asked = self._call(hit_places.COMMIT, number, key)
        return _Coming(asked, lambda answer: bool(answer.success and answer.payload))

    def give_up(self, number: int) -> None:
        """Do nothing: the server takes memory back whose lease is over."""

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
    """An answer of the server, made of what LMCache's future brings."""

    def __init__(self, future: Any, read: Callable[[Any], T]) -> None:
        self._future, self._read = future, read

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._future.wait(timeout))

    def result(self, timeout: float | None = None) -> T:
        return self._read(self._future.result(timeout=timeout))
