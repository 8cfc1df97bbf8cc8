"""A module of LMCache's server, which says in few bytes where chunks are, of all KV cache groups.

    --server-module '{"module_path": "lmcache_xpu.server.server_module"}'

LMCache's own question (PREPARE_RETRIEVE) brings all tokens of the prompt once more, and for its
answer the server makes three tensors of each chunk, to name their shape: most of its time (0.5.6).
Of several KV cache groups LMCache 0.5.6 is told nothing by workers that copy themselves. LMCache
imports this file in the server's process; locks, keys, look-ups and metrics are LMCache's, too.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Self

from lmcache.v1.distributed.api import AttnWindowDesc
from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from lmcache_xpu.cache import hit_places
from lmcache_xpu.cache.hit_places import Groups, Hit, Reservation, needed_chunks, received, sent
from lmcache_xpu.cache.room import Room, object_layout
from lmcache_xpu.server.server_socket import listen_at, refuse_inline_tensors
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.versions.lmcache_server import make_key, server_module_base


class HitPlaces(InstanceLivenessTarget, server_module_base()):  # type: ignore[misc]  # untyped bases
    """Answers workers, at a socket file or else at LMCache's TCP port, in threads of the server."""

    module_name = "lmcache_xpu"

    def __init__(self, context: Any, socket: str | None = None) -> None:
        self._context = context
        self._room = Room(context.storage_manager)
        self._socket = socket
        self._lock = threading.Lock()  # of the next two
        self._is_aligned = False  # an engine has chosen the tokens of a chunk
        self._groups: dict[int, Groups] = {}  # by worker

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
        """Return nothing: the server's status page is not served, see `server_program`."""
        return {}

    def close(self) -> None:
        """Do nothing: what is locked ends with the server."""

    def drop_instance_state(self, instance_id: int) -> None:
        """Unlock what a worker read or wrote that has ended without a word."""
        self._room.drop(lambda hit: hit.instance_id == instance_id)
        with self._lock:
            groups = self._groups.pop(instance_id, None)
        if groups is not None:
            self._context.layout_desc_registry.unregister(groups.model_name, groups.world_size)

    def register_zmq_services(self, server: Any) -> None:
        """Change where the server listens and what it takes; LMCache calls it before it starts."""
        refuse_inline_tensors(server)
        if self._socket is not None:
            listen_at(server, self._socket)

    # Questions

    @server_module_handler(hit_places.ALIGN)  # type: ignore[untyped-decorator]
    def align(self, payload: bytes) -> bytes:
        """Return the tokens of a chunk, rounded up to a multiple of what the first engine asks for.

        LMCache 0.5.7 does that itself. 0.5.6 reads them here whenever it cuts tokens into chunks,
        and nothing is cut before an engine comes.
        """
        context, alignment = self._context, int(payload)
        with self._lock:
            if context.chunk_size % alignment and not self._is_aligned:
                chunk_tokens = -(-context.chunk_size // alignment) * alignment
                context._chunk_size = context.token_hasher.chunk_size = chunk_tokens
            self._is_aligned = True
        return str(context.chunk_size).encode()

    @server_module_handler(hit_places.REGISTER)  # type: ignore[untyped-decorator]
    def register(self, payload: bytes) -> bytes:
        """Let look-ups of an engine know its groups; without groups, forget a worker that ends."""
        groups = received(payload, Groups)
        self.drop_instance_state(groups.instance_id)
        if groups.sizes:
            ChunkLayout.bytes_have_tokens(self._context.chunk_size)
            layouts = {number: object_layout(size) for number, size in enumerate(groups.sizes)}
            self._context.layout_desc_registry.register(
                groups.model_name,
                groups.world_size,
                layouts[0],
                AttnWindowDesc([window or -1 for window in groups.windows], groups.world_size),
                layouts,
            )
            with self._lock:
                self._groups[groups.instance_id] = groups
        return b""

    @server_module_handler(hit_places.LOCATE)  # type: ignore[untyped-decorator]
    def locate(self, payload: bytes) -> bytes:
        """Return where a hit's chunks are, locked until `release`; nothing if one is missing."""
        hit = received(payload, Hit)
        session = self._context.session_manager.get(hit.request_id)
        if session is None or (asked := session.lookup_ipc_key) is None:
            return b""
        key = dataclasses.replace(asked, worker_id=hit.worker_id, start=hit.start, end=hit.end)
        if Hit.of_key(hit.instance_id, hit.number, key, hit.windows) != hit:
            return b""  # it is another engine's request, of the same name
        prompt = self._prompt(key, len(hit.windows))
        first, last = (at // self._context.chunk_size for at in (hit.start, hit.end))
        rows = self._room.locate(hit, prompt, first, needed_chunks(last - first, hit.windows))
        return b"" if rows is None else sent(rows)

    @server_module_handler(hit_places.RELEASE)  # type: ignore[untyped-decorator]
    def release(self, payload: bytes) -> bytes:
        """Unlock the chunks of a hit, of which a worker reads nothing any more."""
        self._room.release(received(payload, Hit))
        return b""

    @server_module_handler(hit_places.RESERVE)  # type: ignore[untyped-decorator]
    def reserve(self, payload: bytes) -> bytes:
        """Return where to store chunks, as far as there is room; hidden until `commit`."""
        hit, sizes, skipped, tokens = received(payload, Reservation)
        key = make_key(tokens, **{name: getattr(hit, name) for name in hit._fields[2:-1]})
        layouts = [object_layout(size) for size in sizes]
        first = hit.start // self._context.chunk_size
        prompt = self._prompt(key, len(sizes))
        return sent(self._room.reserve(hit, prompt, first, skipped, layouts))

    @server_module_handler(hit_places.COMMIT)  # type: ignore[untyped-decorator]
    def commit(self, payload: bytes) -> bytes:
        """Publish chunks that are written; says whether they were still reserved."""
        return b"1" if self._room.commit(received(payload, Hit)) else b""

    def _prompt(self, key: Any, groups: int) -> Any:
        """Return the names of a prompt's objects up to the end of a key, by group."""
        return self._context.resolve_obj_keys(dataclasses.replace(key, start=0), [*range(groups)])


def build_server_modules(build_ctx: Any) -> HitPlaces:
    """Make the module of a server; LMCache 0.5.6 calls it."""
    return HitPlaces(build_ctx.server_context, build_ctx.config.get("socket"))
