"""An imitated LMCache server that lends real shared memory, and what a worker has of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lmcache_xpu.cache.hit_places import (
    COMMIT,
    LOCATE,
    REGISTER,
    RESERVE,
    Groups,
    Hit,
    Reservation,
    Rows,
    received,
    sent,
)
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.server_places import ServerPlaces
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.metrics import LOAD_SERVER, STORE_SERVER
from lmcache_xpu.model.kv_cache_groups import CacheGroup

POOL, ALIGN = 2**20, 64
BLOCK, CHUNK, BLOCKS = 4, 8, 32  # tokens, tokens, blocks of the engine
_numbers = itertools.count()


class Answer:
    """LMCache's future."""

    def __init__(self, result: Any = None, *, comes: bool = True) -> None:
        self._result, self._done = result, threading.Event()
        if comes:
            self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        return self._result


@dataclass(frozen=True)
class Key:
    """LMCache's key of tokens `start` to `end`."""

    tokens: tuple[int, ...]
    start: int
    end: int
    cache_salt: str = ""
    model_name: str = "model"
    world_size: int = 1
    worker_id: int | None = 0
    request_id: str = field(default="request", compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.tokens

    def names(self) -> list[Any]:
        return [
            (self.cache_salt, self.tokens[: end + CHUNK])
            for end in range(self.start, self.end, CHUNK)
        ]


class Client:
    """The server, as its client calls it. Objects are kept by group and by the tokens before."""

    def __init__(self, windows: Sequence[int] = (0,), *, module: bool = True) -> None:
        self.has_module = module  # this package's, see `server_module`
        self.asked: dict[str, Key] = {}  # by request, as its look-up named it
        self.name = f"lmcache-xpu-test-{os.getpid()}-{next(_numbers)}"
        self.path = Path("/dev/shm") / self.name
        self.path.touch(mode=0o600)
        self.path.write_bytes(bytes(POOL))
        self.windows = windows  # chunks at the end, by group; 0 for all
        self.silent = False
        self.calls: list[str] = []
        self.skipped: Any = None
        self.objects: dict[Any, tuple[int, int]] = {}
        self._pending: dict[Any, dict[Any, tuple[int, int]]] = {}
        self._reserved: dict[Hit, Key] = {}
        self._used = 0
        self.sizes: list[int] = []

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def register_kv_cache_engine_driven_context(self, payload: Any) -> Answer:
        self.sizes = [payload.hidden_dim_size]
        return self._answer("register", SimpleNamespace(shm_name=self.name, pool_size=POOL))

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> Answer:
        return self._answer("unregister", None)

    def reserve(self, key: Key, skipped: Any = ()) -> Rows:
        self.skipped = skipped
        lent: dict[Any, tuple[int, int]] = {}
        rows: Rows = []
        for group, size in enumerate(self.sizes):
            for chunk, name in enumerate(key.names()):
                if (group, name) in self.objects or (skipped and chunk in skipped[group]):
                    continue
                lent[group, name] = self._used, size
                self._used += -(-size // ALIGN) * ALIGN
                rows.append((group, chunk, *lent[group, name]))
        self._pending[key] = lent
        return rows

    def publish_unfinished(self) -> None:
        """As LMCache does when a worker that was storing ends."""
        for lent in self._pending.values():
            self.objects |= lent

    def locate(self, key: Key) -> Rows | None:
        """Offsets and lengths; None if a chunk is missing."""
        rows: Rows = []
        names = key.names()
        for group, window in enumerate(self.windows):
            first = max(0, len(names) - window) if window else 0
            for chunk, name in enumerate(names[first:], first):
                if (group, name) not in self.objects:
                    return None
                rows.append((group, chunk, *self.objects[group, name]))
        return rows

    def server_module_call(self, request: Any) -> Answer:
        if not self.has_module:
            return Answer(comes=False)
        payload = b""
        if request.method == REGISTER:
            groups = received(request.payload, Groups)
            if groups.sizes:
                self.sizes, self.windows = list(groups.sizes), groups.windows
        elif request.method == RESERVE:
            hit, _, skipped, tokens = received(request.payload, Reservation)
            key = Key(tokens, hit.start, hit.end, hit.cache_salt, request_id=hit.request_id)
            self.asked.setdefault(hit.request_id, key)
            payload = sent(self.reserve(key, skipped))
            self._reserved[hit] = key
        elif request.method == COMMIT:
            self.objects |= self._pending.pop(self._reserved.pop(received(request.payload, Hit)))
            payload = b"1"
        else:
            hit = received(request.payload, Hit)
            key = self.asked.get(hit.request_id)
            if request.method == LOCATE and key is not None:
                asked = dataclasses.replace(key, start=hit.start, end=hit.end)
                rows = self.locate(asked)
                payload = b"" if rows is None else sent(rows)
        return self._answer(request.method, SimpleNamespace(success=True, payload=payload))

    def _answer(self, call: str, result: Any) -> Answer:
        self.calls.append(call)
        return Answer(result, comes=not self.silent)


class Connection:
    """What a worker knows of an imitated server; see `ServerClient`.

    Args:
        requests: the server.
    """

    chunk_tokens, instance_id, timeout_s, local = CHUNK, 1, 0.3, None
    load_flow, store_flow = LOAD_SERVER, STORE_SERVER
    scope = SimpleNamespace(model_name="model", world_size=1, is_writer=True)

    def __init__(self, requests: Client) -> None:
        self.requests = requests
        self.healthy = threading.Event()
        self.healthy.set()

    def places(self, sizes: Sequence[int], windows: Sequence[int], timeout_s: float) -> Any:
        places = ServerPlaces(self.requests, self.instance_id, sizes, windows)
        places.begin(self.scope, timeout_s)
        return places

    def key(self, chunks: TokenRange, *, worker: bool) -> Key:
        if chunks.tokens is None:
            raise ZeroDivisionError("planted")
        named = chunks.tokens, chunks.start, chunks.end, chunks.salt
        key = Key(*named, request_id=chunks.request_id)
        self.requests.asked[chunks.request_id] = key  # as its look-up has named it
        return key


def chunks_of(
    *blocks: Sequence[int],
    start: int = 0,
    end: int = 24,
    salt: str = "",
    kept: int = 0,
    request_id: str = "request",
    first: int = 0,
    named: bool = True,
) -> TokenRange:
    """Chunks of the request whose first token this is, with blocks; of no key without `named`."""
    tokens = tuple(range(first, first + 24)) if named else None
    return TokenRange(request_id, tokens, start, end, salt, None, blocks, kept)


def succeeds(transfer: Transfer, within_s: float = 10.0) -> bool:
    """Wait until a transfer has ended; whether it succeeded."""
    deadline = time.monotonic() + within_s
    while transfer.result is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(transfer.result)


def filled(seed: int, *, blocks: int = BLOCKS, heads: int = 2) -> torch.Tensor:
    """A layer `[blocks, heads, tokens, content]` whose heads lie inside of tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, BLOCK, heads, 6)
    return torch.randn(shape, generator=generator).permute(0, 2, 1, 3)


def copies(
    caches: dict[str, Any],
    *,
    number: int = 0,
    window: int | None = None,
    recurrent: bool = False,
    block_tokens: int = BLOCK,
) -> GroupCopies:
    group = CacheGroup(
        number=number,
        layers=tuple(caches),
        block_tokens=block_tokens,
        window=window,
        recurrent=recurrent,
    )
    return GroupCopies(group, caches, BLOCKS, CHUNK)
