"""LMCache's cache in the engine's process: the parts of its server, called without a socket.

The parts are LMCache's own: a context with its tiers, look-ups, and this package's module. A
scheduler and a worker in one process share them, by the engine's ID in vLLM's configuration. So
vLLM's engine has to have one worker, in its own process, as vLLM starts it for one device.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from lmcache import device_ops
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import build_server_module_router
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.modules.management import ManagementModule
from lmcache.v1.multiprocess.request_handler import iter_request_handlers
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.mp_connector.lent_memory import LentMemory
from lmcache_xpu.mp_connector.server_module import HitPlaces
from lmcache_xpu.tiers.disk.server_option import server_option
from lmcache_xpu.tiers.shared_option import shared_option
from lmcache_xpu.transfer.devices import is_host, most_pinned
from lmcache_xpu.transfer.pool_memory import PoolMemory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["LocalCache", "LocalCacheOptions"]

LEASE_S = 30  # of memory for a write, as LMCache's server has it; see `launch.cache_server`


class LocalCacheOptions(BaseModel):
    """What vLLM's extra configuration says of the cache, under `xpu.cache`.

    Args:
        chunk_tokens: tokens of a chunk; rounded up to whole blocks of the engine.
        cpu_gib: GiB of host memory.
        disk_path: directory of the disk tier; None for no such tier.
        disk_gib: GiB of that.
        remote_url: of the shared tier; None for no such tier.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_tokens: int = Field(256, ge=1)
    cpu_gib: float = Field(5.0, gt=0)
    disk_path: Path | None = None
    disk_gib: float | None = Field(None, gt=0)
    remote_url: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Check what was configured.

        Raises:
            SettingsError: names the options that are not as expected.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            [first, *_] = error.errors()
            where = ".".join(map(str, first["loc"]))
            raise SettingsError(
                f"xpu.cache with {where}={first['input']!r}",
                f"one of {', '.join(cls.model_fields)}, as `lmcache-xpu serve --dry-run` prints it",
                first["msg"],
            ) from None


class DirectRequests:
    """LMCache's `RequestClient`, whose requests the calling thread answers before a call returns.

    Each method of the protocol has the name of its operation, and returns LMCache's future.

    Args:
        modules: of LMCache's server, whose handlers answer.
        close: is called once by `close`.
    """

    def __init__(self, modules: Sequence[Any], close: Callable[[], None]) -> None:
        self.close = close
        for module in modules:
            for bound in iter_request_handlers(module):
                setattr(self, bound.operation, partial(_answered, bound.handler))


def _answered(handler: Callable[..., Any], *arguments: Any, **named: Any) -> MessagingFuture[Any]:
    answer: MessagingFuture[Any] = MessagingFuture()
    try:
        answer.set_result(handler(*arguments, **named))
    except Exception as error:  # as it would come from a server
        answer.set_exception(error)
    return answer


class LocalCache:
    """The tiers of one engine, and what answers its scheduler and its worker.

    Args:
        options: of the cache.
        device: that copies from and to its memory.
        engine: number of the engine among those that share the disk.
    """

    _of_engines: ClassVar[dict[str, Self]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, options: LocalCacheOptions, device: torch.device, engine: int = 0) -> None:
        self._users = 0
        self._device = device
        # On CPU nothing is pinned, and LMCache's own allocation does.
        pools = None
        if not is_host(device):
            pools = PoolMemory.bind(device_ops, most_pinned(device) or 0, os.environ)
        tiers = []  # in the order in which they are asked
        if options.disk_path is not None:
            tiers.append(server_option(options.disk_path, options.disk_gib or 0, engine=engine))
        if options.remote_url is not None:
            tiers.append(shared_option(options.remote_url))
        adapters = [PluginL2AdapterConfig.from_dict(json.loads(tier)) for tier in tiers]
        self._context = MPCacheServerContext(
            StorageManagerConfig(
                L1ManagerConfig(
                    L1MemoryManagerConfig(
                        int(options.cpu_gib * 2**30), use_lazy=False, shm_name=""
                    ),
                    write_ttl_seconds=LEASE_S,
                ),
                EvictionConfig("LRU"),
                L2AdaptersConfig(adapters),
                prefetch_policy="retain",  # in memory what came from them
            ),
            chunk_size=options.chunk_tokens,
            separate_object_groups=True,
        )
        address = self._context.storage_manager.l1_memory_desc.ptr
        self._is_pinned = pools is not None and pools.has_pinned(address)
        places = HitPlaces(self._context)
        self._modules = [
            LookupModule(self._context),
            ManagementModule(self._context),
            places,
            build_server_module_router(self._context, [places]),
        ]

    @classmethod
    def of_engine(
        cls, config: VllmConfig, options: LocalCacheOptions, device: torch.device
    ) -> Self:
        """Return the cache of an engine, made by the first of its halves that asks.

        Raises:
            SettingsError: the engine has several workers, or the disk can't be used.
        """
        parallel = config.parallel_config
        if parallel.world_size > 1:
            raise SettingsError(
                f"an engine of {parallel.world_size} devices, and a cache in its process",
                "one device",
                "Use a server: `lmcache-xpu serve` starts one, with --cache server.",
            )
        name = config.kv_transfer_config.engine_id
        with cls._making:
            if name not in cls._of_engines:
                cls._of_engines[name] = cls(options, device, parallel.data_parallel_index)
            cache = cls._of_engines[name]
            cache._users += 1
        return cache

    def requests(self) -> DirectRequests:
        """Return a client for one half of the connector; the last that is closed ends the cache."""
        return DirectRequests(self._modules, self._leave)

    def memory(self) -> LentMemory:
        """Return the memory of chunks, pinned where that is possible."""
        pool = self._context.storage_manager.l1_memory_desc
        return LentMemory.at(pool.ptr, pool.size, self._device, is_pinned=self._is_pinned)

    def _leave(self) -> None:
        with self._making:
            self._users -= 1
            if self._users:
                return
            for name in [name for name, cache in self._of_engines.items() if cache is self]:
                del self._of_engines[name]
        for module in self._modules:
            module.close()
        self._context.close()
