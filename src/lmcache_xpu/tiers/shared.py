"""The shared tier: chunks in a Valkey or Redis server that several engines use together.

Switched on in LMCache's configuration, as one of its remote connectors:

    remote_storage_plugins: ["shared"]
    extra_config:
      remote_storage_plugin.shared.module_path: lmcache_xpu.remote
      remote_storage_plugin.shared.class_name: RemoteTier  # `SharedTier` under its settings' name
      shared.url: redis://cache:6379

LMCache's own Redis connector keeps a chunk under two keys, which the server evicts one by one,
and holds on to host memory when only one is left. Here a chunk is one value, with the bytes of a
file of the disk tier: a header with checksums, and the chunk. The password comes from a variable,
because LMCache logs its URLs and everyone on a machine can read its processes' arguments.

The server may be away, slow, full or empty at any time, and its values may be damaged: then a chunk
is not found, or not kept. After an error the server is left alone for a few seconds, as a request
would wait for each attempt; a look-up, a load or a store that takes too long in all is such an
error. A server that answers, but takes no writes, is only not written to. A value that is damaged,
or is no chunk of this engine's layout, is deleted: its name is that of such a chunk, and the next
store puts a whole one there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from lmcache_xpu.metrics import LOAD_SHARED, STORE_SHARED, Flow
from lmcache_xpu.tiers.chunk_key import KeyTexts
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.chunk_file import pack_chunk
from lmcache_xpu.tiers.pause import Pause
from lmcache_xpu.tiers.residency import SHARED
from lmcache_xpu.tiers.shared_lookup import FORMAT, SharedLookup
from lmcache_xpu.tiers.shared_value import SharedValue, make, unpack

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from lmcache_xpu.tiers.residency import Residency

__all__ = ["PASSWORD_VARIABLE", "SharedTier"]

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("vllm.lmcache_xpu.remote")  # vLLM prints its own loggers only

PASSWORD_VARIABLE = "LMCACHE_XPU_REMOTE_PASSWORD"
URL_KEY = "shared.url"
CONNECT_S = 2.0
ANSWER_S = 10.0
LOOKUP_S = 1.0  # in all, for which a request may wait
LOAD_SHARE = 0.8  # of the time after which LMCache gives up a request's load, with what came
SEND_S = 10.0  # for one chunk
AWAY_S = 10.0  # that a server is left alone after an error, or not written to after a refusal
CLOSE_S = 10.0
THREADS = 4  # that make and compare checksums: 2 GB/s each
# Not WATCH and MULTI, which a full server refuses.
_DELETE = """
if redis.sha1hex(redis.call("GET", KEYS[1]) or "") == ARGV[1] then redis.call("DEL", KEYS[1]) end
"""


class SharedTier(RemoteConnector):  # type: ignore[misc]  # untyped base
    """Chunks in a Valkey or Redis server. Runs on LMCache's event loop; nothing raises into it.

    Connects with the first look-up, so that it does not matter which of the two starts first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local_cpu_backend: LocalCPUBackend,
        config: LMCacheEngineConfig,
    ) -> None:
        metadata = local_cpu_backend.metadata
        super().__init__(config, metadata)
        self._loop = loop
        self._pool = local_cpu_backend
        self._texts = KeyTexts(metadata)
        self._hidden: int = metadata.kv_shape[3] * metadata.kv_shape[4]
        self._metadata = metadata
        self._partial: bool = config.save_unfull_chunk
        self._load_s = LOAD_SHARE * config.blocking_timeout_secs
        # Chunks on their way stay in host memory, which the engine needs for other things too.
        self._limit_bytes = int(config.max_local_cpu_size * 2**30) // 4
        self._sending_bytes = 0
        self._residency: Residency | None = None
        self._away = Pause(logger, "left alone")
        self._refusing = Pause(logger, "not written to")
        self._refusal = ""
        self._threads = ThreadPoolExecutor(THREADS, "lmcache-xpu-shared")
        # Values of other shards may be several times as large as what is made of them.
        self._making = asyncio.Semaphore(THREADS)
        self._sending = asyncio.Semaphore(THREADS)  # or a chunk's time would be that of a queue
        self._server = Redis.from_url(
            (config.extra_config or {})[URL_KEY],
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            # A server that was restarted has left the pool with closed connections: an operation
            # that meets one is tried once more, on a new one. Not after a time-out.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )

        self._stored = SharedLookup(self._server, self._texts)

    def watch(self, residency: Residency) -> None:
        """Report chunks that turn out to be on the server or missing, or are put there.

        The server reports no eviction: that is learned when a chunk is looked up again.
        """
        self._residency = residency

    def _report(self, key: CacheEngineKey, is_stored: bool) -> None:
        if self._residency is not None and self._texts.shard.stores:
            self._residency.changed(SHARED, key.chunk_hash_hex, is_stored)

    # Lookup

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the server has the chunk."""
        return await self._stored_prefix([key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """`exists`, from any thread but the loop's."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """One round trip for all chunks of a prompt."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Length of the prefix of `keys` that the server has; from any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(self._stored_prefix(keys), self._loop).result()

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """`batched_contains` on the loop; there are no pins, as the server may always evict."""
        return await self._stored_prefix(keys)

    async def _stored_prefix(self, keys: list[CacheEngineKey]) -> int:
        if self._away.on:
            return 0
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await self._stored.prefix(keys, self._report)
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            return 0

    # Load

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, with one reference for the caller; None on a miss."""
        if self._away.on:
            return None
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._load_s):
                value = await self._value(self._texts.text(key), self._hidden)
                if value is not None:
                    return self._to_pool(value, begin)
                self._report(key, False)
                async with self._making:
                    return await self._make(key, begin)
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            LOAD_SHARED.failed("server")
            return None

    async def _make(self, key: CacheEngineKey, begin: float) -> MemoryObj | None:
        """The chunk, made of others; None where one of those is missing."""
        sources = list(self._texts.sources(key))
        for source, complete in zip(sources, await self._stored.complete(sources), strict=True):
            if not complete:
                continue
            hidden = self._hidden if source.cut is None else source.cut.width(self._hidden)
            fetched = [await self._value(text, hidden) for text in source.texts]
            values = [value for value in fetched if value is not None]
            if len(values) == len(fetched):
                value = await self._in_thread(make, values, source.cut, self._hidden)
                return None if value is None else self._to_pool(value, begin)
        return None

    def _to_pool(self, value: SharedValue, begin: float) -> MemoryObj | None:
        # Waiting here for memory could be for ever: this load's own chunks may fill the pool.
        layout = value.layout
        obj = self._pool.allocate(
            list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
        )
        if obj is None:
            LOAD_SHARED.failed("pool_full")
            return None
        memoryview(obj.byte_array).cast("B")[: layout.size] = value.payload
        _count(LOAD_SHARED, obj, time.perf_counter() - begin)
        return obj

    async def _value(self, text: str, hidden: int) -> SharedValue | None:
        """Return the value of a key, with so many elements of a token; a damaged one is deleted."""
        name = self._stored.name(text)
        value: Any = await self._server.get(name)
        if value is None:
            return None
        try:
            return await self._in_thread(unpack, name, value, self._whole(hidden), self._partial)
        except ValueError as damage:
            LOAD_SHARED.failed("corrupt")
            logger.warning(
                "shared tier: a damaged chunk of %d bytes: %s "
                "(docs: troubleshooting#shared-damaged)",
                len(value),
                damage,
            )
            await self._delete(name, value)
            return None

    def _whole(self, hidden: int) -> ChunkLayout:
        """Return the layout of a whole chunk, as engines like this one store it."""
        shapes = [torch.Size([*shape[:-1], hidden]) for shape in self._metadata.get_shapes()]
        return ChunkLayout(tuple(shapes), tuple(self._metadata.get_dtypes()), self.meta_fmt)

    async def _delete(self, name: str, damaged: bytes) -> None:
        """Delete this value, but not one that another engine has stored there since."""
        digest = await self._in_thread(_digest, damaged)
        with contextlib.suppress(ResponseError):  # it may not be deleted, and stays a miss
            await self._server.eval(_DELETE, 1, name, digest)

    # Store

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Send a chunk, unless the server has it or too much is on its way already."""
        layout, size = ChunkLayout.of(memory_obj), memory_obj.get_size()
        if self._away.on or layout is None or not self._texts.shard.stores:
            return
        if self._refusing.on:
            STORE_SHARED.failed(self._refusal)
            return
        if self._sending_bytes + size > self._limit_bytes:
            STORE_SHARED.failed("behind")
            return
        self._sending_bytes += size
        try:
            async with self._sending:
                if self._refusing.on:  # since this one waits
                    STORE_SHARED.failed(self._refusal)
                elif not self._away.on:
                    async with asyncio.timeout(SEND_S):
                        await self._send(key, memory_obj, layout)
        except ResponseError as error:  # it answers: there is no cause to wait for its reads
            self._refusal = "full" if isinstance(error, OutOfMemoryError) else "refused"
            self._refusing.begin(AWAY_S, error)
            STORE_SHARED.failed(self._refusal)
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            STORE_SHARED.failed("server")
        finally:
            self._sending_bytes -= size

    async def _send(self, key: CacheEngineKey, memory_obj: MemoryObj, layout: ChunkLayout) -> None:
        begin, name = time.perf_counter(), self._stored.name(self._texts.text(key))
        async with asyncio.timeout(LOOKUP_S):
            is_stored = await self._server.exists(name)
        if not is_stored:
            payload = memoryview(memory_obj.byte_array).cast("B")[: layout.size]
            value = await self._in_thread(pack_chunk, name, layout.text, payload)
            await self._server.set(name, value)
            _count(STORE_SHARED, memory_obj, time.perf_counter() - begin)
        self._report(key, True)

    # The rest of LMCache's interface

    async def list(self) -> list[str]:
        """Names of all chunks of all engines on the server."""
        return [key.decode() async for key in self._server.scan_iter(match=f"{FORMAT}@*")]

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Remove a chunk; False if the server did not have it."""
        return asyncio.run_coroutine_threadsafe(self._remove(key), self._loop).result()

    async def _remove(self, key: CacheEngineKey) -> bool:
        if self._away.on:
            return False
        try:
            async with asyncio.timeout(LOOKUP_S):
                removed = await self._server.delete(self._stored.name(self._texts.text(key)))
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            return False
        self._report(key, False)
        return bool(removed)

    async def close(self) -> None:
        """Wait a little for what is on its way, then disconnect."""
        end = time.monotonic() + CLOSE_S
        while self._sending_bytes and time.monotonic() < end:
            await asyncio.sleep(0.01)
        with contextlib.suppress(RedisError, OSError):
            await self._server.aclose()
        self._threads.shutdown()

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what would hold up LMCache's loop: milliseconds of work on a large chunk."""
        return await self._loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    def _leave_alone(self, error: Exception) -> None:
        # What asyncio raises at the end of a time has no text.
        self._away.begin(AWAY_S, error if str(error) else TimeoutError("it answers too slowly"))


def _digest(value: bytes) -> str:
    return hashlib.sha1(value).hexdigest()


def _count(flow: Flow, obj: MemoryObj, seconds: float) -> None:
    flow.moved(size_bytes=obj.get_size(), tokens=obj.get_num_tokens(), seconds=seconds)
