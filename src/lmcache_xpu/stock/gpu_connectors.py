"""The GPU connectors of LMCache's engine, and how LMCache comes to make these instead of its own.

LMCache makes them in a function that chooses by device. So that is replaced while an engine starts.

An exception of a connector would end vLLM's engine, and LMCache would never give up its references
to the chunks of the load. So a load raises nothing: its slots go to `failed_slots`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import SeamError
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.transfer.devices import most_pinned
from lmcache_xpu.transfer.pool_memory import PoolMemory
from lmcache_xpu.versions.lmcache import VLLMPagedMemLayerwiseXPUConnector as LMCacheLayerwise
from lmcache_xpu.versions.lmcache import in_process_module

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_xpu.model.kv_cache_facts import EngineFacts

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Layers = Generator[None, Sequence[MemoryObj] | None, None]
SEAM = "CreateGPUConnector"


class FailedLoads:
    """What both connectors of an engine do about loads that fail."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.failed_slots: list[torch.Tensor] = []  # but those that the engine has itself

    def fail(self, cause: Exception | str, load: dict[str, Any], first: int) -> None:
        """Add the slots of a load, of LMCache's keyword arguments, from a token on; log why."""
        first = max(first, load.get("vllm_cached_tokens", 0))
        self.failed_slots.append(load["slot_mapping"][first:])
        log_failure("A load failed and is computed instead", cause)


class StandardConnector(FailedLoads, VLLMPagedMemXPUConnectorV2):
    """The standard connector of one engine."""

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """Load chunks."""
        try:
            super().batched_to_gpu(memory_objs, starts, ends, **kwargs)
        except Exception as error:
            self.fail(error, kwargs, starts[0])


class LayerwiseConnector(FailedLoads, VLLMPagedMemLayerwiseXPUConnector):
    """The layerwise connector of one engine."""

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> Layers:
        """Load a request layer by layer; after an error the generator drops the other layers.

        LMCache does not report a chunk that its look-up found and its load did not: it ends the
        load there. And it unpins, at the end, all objects that the load took. In its CPU tier it
        would take back the pins of look-ups, other requests' too; so each object gets a pin here.
        """
        promised = len(kwargs["slot_mapping"])
        if ends[-1] < promised:
            self.fail(f"{ends[-1]} of {promised} tokens", kwargs, ends[-1])
        load: Layers | None = super().batched_to_gpu(starts, ends, **kwargs)
        memory_objs: Sequence[MemoryObj] | None = None
        for _ in range(self.num_layers + 2):
            for memory_obj in memory_objs or ():
                memory_obj.pin()
            if load is not None:
                try:
                    load.send(memory_objs)
                except Exception as error:
                    self.fail(error, kwargs, starts[0])
                    load = None
            memory_objs = yield


# LMCache takes layerwise connectors of a fixed list of classes alone.
LMCacheLayerwise.register(LayerwiseConnector)


def gpu_connector(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, facts: EngineFacts
) -> StandardConnector | LayerwiseConnector:
    """Return the connector of an engine.

    The chunk shape and the model's name in LMCache's metadata, which decide on keys, become those
    of the engine's content: with inline scales or unequal sizes of keys and values that is not what
    LMCache derives from the model's heads.
    """
    layers, planes, chunk_size, _, _ = metadata.kv_shape
    metadata.kv_shape = (layers, planes, chunk_size, facts.heads, facts.head_size)
    metadata.model_name += facts.namespace  # the part of every key that we may extend
    if not config.use_layerwise and planes > 1 and not facts.opaque_blocks:
        metadata.model_name += ".layers"  # bytes in another order than LMCache's format says
    kind = LayerwiseConnector if config.use_layerwise else StandardConnector
    staging_mib = config.get_extra_config_value("xpu.staging_mib", None)
    return kind.from_metadata(
        metadata,
        device=facts.device_type,
        layout_hints={"kv_layout": facts.kv_layout},
        opaque_blocks=facts.opaque_blocks,
        staging_bytes=None if staging_mib is None else int(staging_mib) * 2**20,
        layer_major=True,
    )


@contextmanager
def making(facts: EngineFacts) -> Iterator[None]:
    """Let LMCache start an engine meanwhile, with a connector of this package.

    Raises SeamError if LMCache made no such connector.
    """
    limit_pinning(torch.device(facts.device_type))
    module = in_process_module("v1.gpu_connector")
    original, made = getattr(module, SEAM), []

    def make(config: LMCacheEngineConfig, metadata: LMCacheMetadata, *_: Any, **__: Any) -> Any:
        made.append(gpu_connector(config, metadata, facts))
        return made[-1]

    setattr(module, SEAM, make)
    try:
        yield
    finally:
        setattr(module, SEAM, original)
    if len(made) != 1:
        raise SeamError(
            f"an LMCache that made {len(made)} GPU connectors of this package",
            "one, for an engine of its own",
            "Its error is in the log above; or another engine of this process has LMCache.",
        )


def limit_pinning(device: torch.device) -> None:
    """Keep LMCache's pool from a pinned allocation that fails; see `pool_memory`."""
    if (most := most_pinned(device)) is not None:
        from lmcache import device_ops

        PoolMemory.bind(device_ops, most, os.environ)


def log_failure(message: str, cause: Exception | str) -> None:
    """Log a transfer that failed, with the trace of an exception."""
    error = cause if isinstance(cause, Exception) else None
    logger.error("%s: %s (docs: troubleshooting#transfer-failed)", message, cause, exc_info=error)
