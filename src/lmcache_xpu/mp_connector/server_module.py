"""A module of LMCache's server, which says in few bytes where the chunks of a hit are.

    --server-module '{"module_path": "lmcache_xpu.mp_connector.server_module"}'

LMCache's own question (PREPARE_RETRIEVE) brings all tokens of the prompt once more, and for its
answer the server makes three tensors of each chunk, to name their shape: 62 % of its time (0.5.6,
240 chunks, sampled on a 2-core VM). Locks, keys and what the server counts are LMCache's here too.

LMCache imports this file in the server's process; nothing else does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import Any, Self

from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from lmcache_xpu.mp_connector.hit_places import HELLO, LOCATE, RELEASE, Hit, sent_places
from lmcache_xpu.mp_connector.server_socket import listen_at, refuse_inline_tensors
from lmcache_xpu.versions.lmcache_server import ServerModuleBase

__all__ = ["HitPlaces", "build_server_modules"]

_EARLY = 1024  # releases that may come before the answer that they are of


class HitPlaces(InstanceLivenessTarget, ServerModuleBase):  # type: ignore[misc]  # untyped bases
    """Answers workers. Handlers run in threads of the server.

    Args:
        context: LMCache's, of the server.
        socket: path of the file to listen at; None: at LMCache's TCP port.
    """

    module_name = "lmcache_xpu"

    def __init__(self, context: Any, socket: str | None = None) -> None:
        self._context = context
        self._socket = socket
        self._lock = threading.Lock()  # of the next two
        self._reads: dict[Hit, list[Any]] = {}  # keys of objects that a worker reads
        self._released: OrderedDict[Hit, None] = OrderedDict()  # before they were located

    @classmethod
    def create(cls, build_ctx: Any) -> Self:
        """Make the module of a server; LMCache from 0.5.7 on calls it."""
        return cls(build_ctx.engine_context, build_ctx.config_for(cls).get("socket"))

    # LMCache's interface of a module

    @property
    def context(self) -> Any:
        """LMCache's, of the server."""
        return self._context

    def report_status(self) -> dict[str, int]:
        """Return how many hits are being read."""
        with self._lock:
            return {"lmcache_xpu_hits_being_read": len(self._reads)}

    def close(self) -> None:
        """Nothing: what is locked ends with the server."""

    def drop_instance_state(self, instance_id: int) -> None:
        """Unlock what a worker read that has ended without a word."""
        with self._lock:
            hits = [hit for hit in self._reads if hit.instance_id == instance_id]
            left = [key for hit in hits for key in self._reads.pop(hit)]
        self._end(left)

    def register_zmq_services(self, server: Any) -> None:
        """Change where the server listens and what it takes; LMCache calls it before it starts."""
        refuse_inline_tensors(server)
        if self._socket is not None:
            listen_at(server, self._socket)

    # Questions

    @server_module_handler(HELLO)  # type: ignore[untyped-decorator]
    def hello(self, _payload: bytes) -> bytes:
        """Say that it is here."""
        return b""

    @server_module_handler(LOCATE)  # type: ignore[untyped-decorator]
    def locate(self, payload: bytes) -> bytes:
        """Return where the chunks of a hit are; nothing if one is not there, as LMCache does.

        They stay locked, as their look-up has locked them, until `release`.
        """
        hit = Hit.received(payload)
        session = self._context.session_manager.get(hit.request_id)
        asked = None if session is None else session.lookup_ipc_key
        if asked is None:
            return b""
        key = dataclasses.replace(asked, worker_id=hit.worker_id, start=hit.start, end=hit.end)
        if Hit.of_key(hit.instance_id, hit.number, key) != hit:
            return b""  # it is another engine's request, of the same name
        [names] = self._context.resolve_obj_keys(key, [0])
        keys, objects = self._context.storage_manager.unsafe_read(names)
        with self._lock:
            ended = hit in self._released
            self._released.pop(hit, None)
            if (is_whole := not ended and len(keys) == len(names)) and keys:
                self._reads[hit] = keys
        if not is_whole:
            self._end(keys)
            return b""
        return sent_places((each.shm_offset, each.shm_byte_length) for each in objects)

    @server_module_handler(RELEASE)  # type: ignore[untyped-decorator]
    def release(self, payload: bytes) -> bytes:
        """Unlock the chunks of a hit, of which a worker reads nothing any more.

        The thread of an earlier question may be slower than this one.
        """
        hit = Hit.received(payload)
        with self._lock:
            keys = self._reads.pop(hit, None)
            if keys is None:
                self._released[hit] = None
                if len(self._released) > _EARLY:
                    self._released.popitem(last=False)
        self._end(keys or [])
        return b""

    def _end(self, keys: list[Any]) -> None:
        if keys:
            self._context.storage_manager.finish_read_prefetched(keys)


def build_server_modules(build_ctx: Any) -> HitPlaces:
    """Make the module of a server; LMCache 0.5.6 calls it."""
    return HitPlaces(build_ctx.server_context, build_ctx.config.get("socket"))
