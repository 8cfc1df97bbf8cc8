"""The shared tier: chunks in a Valkey or Redis server that several engines use together.

Switched on in LMCache's configuration, as one of its remote connectors:

    remote_storage_plugins: ["shared"]
    extra_config:
      remote_storage_plugin.shared.module_path: lmcache_xpu.remote
      remote_storage_plugin.shared.class_name: RemoteTier
      shared.url: redis://cache:6379

LMCache's own Redis connector keeps a chunk under two keys, which the server evicts one by one,
and holds on to host memory when only one is left. Here a chunk is one value: length of its
layout, layout, bytes. The password comes from a variable, because LMCache logs its URLs and
everyone on a machine can read its processes' arguments.

The server may be away, slow or empty at any time: then a chunk is not found, or not kept. After
an error the server is left alone for a few seconds, as a request would wait for each attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
from typing import TYPE_CHECKING, Any

from lmcache import torch_device_type
from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from lmcache_xpu.disk.chunk_layout import ChunkLayout
from lmcache_xpu.metrics import LOAD_SHARED, STORE_SHARED, Flow
from lmcache_xpu.residency import SHARED

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from lmcache_xpu.residency import Residency

__all__ = ["PASSWORD_VARIABLE", "RemoteTier"]

logger = logging.getLogger("vllm.lmcache_xpu.remote")  # vLLM prints its own loggers only

PASSWORD_VARIABLE = "LMCACHE_XPU_REMOTE_PASSWORD"
URL_KEY = "shared.url"
CONNECT_S = 2.0
ANSWER_S = 10.0
AWAY_S = 10.0  # that a server is left alone after an error
CLOSE_S = 10.0

_LENGTH = struct.Struct("<I")


class RemoteTier(RemoteConnector):  # type: ignore[misc]  # untyped base
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
        # What the same key could stand for in another engine; see disk.tier.
        self._origin = f"{torch_device_type}@{metadata.kv_shape}"
        # Chunks on their way stay in host memory, which the engine needs for other things too.
        self._limit_bytes = int(config.max_local_cpu_size * 2**30) // 4
        self._sending_bytes = 0
        self._away_until = 0.0
        self._residency: Residency | None = None
        self._server = Redis.from_url(
            (config.extra_config or {})[URL_KEY],
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            # A server that was restarted has left the pool with closed connections: an operation
            # that meets one is tried once more, on a new one. Not after a time-out.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )

    def watch(self, residency: Residency) -> None:
        """Tell of chunks that are found on the server, or put there, or missing.

        The server tells of no eviction: that is learned when a chunk is asked for again.
        """
        self._residency = residency

    def _tell(self, key: CacheEngineKey, held: bool) -> None:
        if self._residency is not None:
            self._residency.changed(SHARED, key.chunk_hash_hex, held)

    # Lookup

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the server has the chunk."""
        return await self._found([key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """`exists`, from any thread but the loop's."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """One round trip for all chunks of a prompt."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Length of the prefix of `keys` that the server has; from any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(self._found(keys), self._loop).result()

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """As `batched_contains`, on the loop. There are no pins: the server may always evict."""
        return await self._found(keys)

    async def _found(self, keys: list[CacheEngineKey]) -> int:
        if self._away:
            return 0
        try:
            async with self._server.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(self._name(key))
                found = await pipeline.execute()
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            return 0
        for key, there in zip(keys, found, strict=True):
            self._tell(key, bool(there))
        return found.index(0) if 0 in found else len(found)

    # Load

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, with one reference for the caller; None on a miss."""
        if self._away:
            return None
        begin = time.perf_counter()
        try:
            value: Any = await self._server.get(self._name(key))
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            LOAD_SHARED.failed("server")
            return None
        if value is None:
            self._tell(key, False)
        obj = None if value is None else self._unpack(memoryview(value))
        if obj is not None:
            _count(LOAD_SHARED, obj, time.perf_counter() - begin)
        return obj

    def _unpack(self, value: memoryview) -> MemoryObj | None:
        (length,) = _LENGTH.unpack_from(value)
        begin = _LENGTH.size + length
        layout = ChunkLayout.parse(str(value[_LENGTH.size : begin], "utf-8"))
        if layout.size != len(value) - begin:
            logger.warning("shared tier: a chunk of %d bytes, not %d", len(value), layout.size)
            LOAD_SHARED.failed("corrupt")
            return None
        # Waiting here for memory could be for ever: this load's own chunks may fill the pool.
        obj = self._pool.allocate(
            list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
        )
        if obj is None:
            LOAD_SHARED.failed("pool_full")
        else:
            memoryview(obj.byte_array).cast("B")[: layout.size] = value[begin:]
        return obj

    # Store

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Send a chunk, unless the server has it or too much is on its way already."""
        layout, size = ChunkLayout.of(memory_obj), memory_obj.get_size()
        if self._away or layout is None:
            return
        if self._sending_bytes + size > self._limit_bytes:
            STORE_SHARED.failed("behind")
            return
        begin = time.perf_counter()
        self._sending_bytes += size
        try:
            if not await self._server.exists(name := self._name(key)):
                text = layout.text.encode()
                payload = memoryview(memory_obj.byte_array).cast("B")[: layout.size]
                await self._server.set(name, b"".join((_LENGTH.pack(len(text)), text, payload)))
                _count(STORE_SHARED, memory_obj, time.perf_counter() - begin)
            self._tell(key, True)
        except (RedisError, OSError) as error:
            self._leave_alone(error)
            STORE_SHARED.failed("server")
        finally:
            self._sending_bytes -= size

    # The rest of LMCache's interface

    async def list(self) -> list[str]:
        """Names of all chunks of all engines on the server."""
        return [key.decode() async for key in self._server.scan_iter(match="kv@*")]

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Remove a chunk; False if the server did not have it."""
        return asyncio.run_coroutine_threadsafe(self._remove(key), self._loop).result()

    async def _remove(self, key: CacheEngineKey) -> bool:
        removed = bool(await self._server.delete(self._name(key)))
        self._tell(key, False)
        return removed

    async def close(self) -> None:
        """Wait a little for what is on its way, then disconnect."""
        end = time.monotonic() + CLOSE_S
        while self._sending_bytes and time.monotonic() < end:
            await asyncio.sleep(0.01)
        with contextlib.suppress(RedisError, OSError):
            await self._server.aclose()

    @property
    def _away(self) -> bool:
        return time.monotonic() < self._away_until

    def _leave_alone(self, error: Exception) -> None:
        if not self._away:
            logger.warning("shared tier: left alone for %g s: %s", AWAY_S, error)
        self._away_until = time.monotonic() + AWAY_S

    def _name(self, key: CacheEngineKey) -> str:
        layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
        return (
            f"kv@{self._origin}@{key.world_size}@{key.worker_id}@{key.chunk_hash_hex}@{key.dtype}"
            f"@{layer}@{key.model_name}"
        )


def _count(flow: Flow, obj: MemoryObj, seconds: float) -> None:
    flow.moved(size_bytes=obj.get_size(), tokens=obj.get_num_tokens(), seconds=seconds)
