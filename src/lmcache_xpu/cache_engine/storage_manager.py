"""LMCache's tiers of one worker: chunks are published when complete, tiers end before the pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache import torch_device_type
from lmcache.v1.storage_backend import is_cuda_worker, storage_manager

from lmcache_xpu.cache_engine.cpu_pool import LocalCPUBackend

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj

    from lmcache_xpu.gpu_connector.in_flight import InFlight

__all__ = ["StorageManager"]

POOL = "LocalCPUBackend"


class StorageManager(storage_manager.StorageManager):  # type: ignore[misc]  # untyped base
    """LMCache's storage manager, which knows of stores that are still in flight."""

    in_flight: InFlight | None = None  # set when the engine's KV cache is registered
    # Of the layerwise load that begins, where it is fetched as a whole: what comes of each group.
    layers: Sequence[Future[list[MemoryObj]]] | None = None

    def create_backends(self) -> dict[str, str]:
        """Make the tiers, the CPU tier of this package; LMCache keeps those that are there."""
        if POOL not in self.storage_backends:
            device = torch_device_type if is_cuda_worker(self.metadata) else "cpu"
            self.storage_backends[POOL] = LocalCPUBackend(
                self.config, self.metadata, device, self.lmcache_worker
            )
        created: dict[str, str] = super().create_backends()
        return created

    def batched_put(
        self,
        keys: Sequence[CacheEngineKey],
        memory_objs: list[MemoryObj],
        transfer_spec: Any = None,
        location: str | None = None,
    ) -> None:
        """Hand chunks to the tiers once their copies are complete: now, or from another thread.

        LMCache calls this as soon as the GPU connector returns; its tiers would read what is still
        being written.

        Args:
            keys: of the chunks.
            memory_objs: their host memory; the caller's references go with it.
            transfer_spec: LMCache's, for engines that hand over KV.
            location: name of the one tier that takes them; None: all.
        """
        put = functools.partial(super().batched_put, keys, memory_objs, transfer_spec, location)
        if self.in_flight is None:
            put()
        else:
            self.in_flight.publish(memory_objs, put)

    def layerwise_batched_get(
        self, keys: Sequence[Sequence[CacheEngineKey]], location: str | None = None
    ) -> Iterator[Future[list[MemoryObj]]]:
        """Fetch one group of layers after the other, or all at once where `layers` is set.

        Args:
            keys: `[group][chunk]`.
            location: name of the tier.
        """
        layers: Iterator[Future[list[MemoryObj]]] = super().layerwise_batched_get(keys, location)
        if self.layers is None:
            return layers
        self.layers = tuple(layers)
        return iter(self.layers)

    def close(self) -> None:
        """End the tiers, which may still write from the CPU pool's memory, and then the pool."""
        if POOL in self.storage_backends:
            self.storage_backends.move_to_end(POOL)
        super().close()
