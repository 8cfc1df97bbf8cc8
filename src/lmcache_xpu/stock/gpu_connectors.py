"""The GPU connectors of LMCache's engine, and how LMCache comes to make these instead of its own.

LMCache makes them in a function that chooses by device, and has none for CPU. So that function is
replaced while an engine starts, and put back.

An exception of a connector would end vLLM's engine, and LMCache would never give up its references
to the chunks of the load. So a load raises nothing: what did not arrive goes to `unfilled`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import SeamError
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.stock.health import limit_pinning
from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.versions.lmcache import VLLMPagedMemLayerwiseXPUConnector as LMCacheLayerwise
from lmcache_xpu.versions.lmcache import in_process_module

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_xpu.model.kv_cache_facts import EngineFacts

__all__ = ["LayerwiseConnector", "StandardConnector", "gpu_connector", "making"]

Layers = Generator[None, Sequence[MemoryObj] | None, None]
SEAM = "CreateGPUConnector"


class StandardConnector(VLLMPagedMemXPUConnectorV2):
    """The standard connector of one engine; `unfilled` is set by who makes it."""

    unfilled: UnfilledBlocks

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Load chunks."""
        try:
            super().batched_to_gpu(memory_objs, starts, ends, **kwargs)
        except Exception as error:
            self.unfilled.add_load(error, kwargs, starts[0])


class LayerwiseConnector(VLLMPagedMemLayerwiseXPUConnector):
    """The layerwise connector of one engine; `unfilled` is set by who makes it."""

    unfilled: UnfilledBlocks

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> Layers:
        """Load a request layer by layer; after an error the generator drops the other layers.

        LMCache does not report a chunk that its look-up found and its load did not: it ends the
        load there. And it unpins, at the end, all objects that the load took. In its CPU tier it
        would take back the pins of look-ups, other requests' too; so each object gets a pin here.
        """
        promised = len(kwargs["slot_mapping"])
        if ends[-1] < promised:
            self.unfilled.add_load(f"{ends[-1]} of {promised} tokens", kwargs, ends[-1])
        load: Layers | None = super().batched_to_gpu(starts, ends, **kwargs)
        memory_objs: Sequence[MemoryObj] | None = None
        for _ in range(self.num_layers + 2):
            for memory_obj in memory_objs or ():
                memory_obj.pin()
            if load is not None:
                try:
                    load.send(memory_objs)
                except Exception as error:
                    self.unfilled.add_load(error, kwargs, starts[0])
                    load = None
            while self.failed_slots:
                self.unfilled.add_slots(self.failed_slots.pop())
            memory_objs = yield


# LMCache takes layerwise connectors of a fixed list of classes alone.
LMCacheLayerwise.register(LayerwiseConnector)


def gpu_connector(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, facts: EngineFacts
) -> StandardConnector | LayerwiseConnector:
    """Return the connector of an engine.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's description of the engine. Its chunk shape and its model's name, which
            decide on keys, are changed to those of the engine's real content.
        facts: of the engine's KV cache.
    """
    # With inline scales or unequal key and value sizes the engine's content is not what LMCache
    # derives from the model's heads.
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
def making(facts: EngineFacts, unfilled: UnfilledBlocks) -> Iterator[None]:
    """Let LMCache start an engine meanwhile, with a connector of this package and its own memory.

    Args:
        facts: of the engine's KV cache.
        unfilled: the worker's record of failed loads.

    Raises:
        SeamError: LMCache made no such connector.
    """
    limit_pinning(torch.device(facts.device_type))
    module = in_process_module("v1.gpu_connector")
    original, made = getattr(module, SEAM), []

    def make(
        config: LMCacheEngineConfig, metadata: LMCacheMetadata, *_: Any, **__: Any
    ) -> StandardConnector | LayerwiseConnector:
        connector = gpu_connector(config, metadata, facts)
        connector.unfilled = unfilled
        made.append(connector)
        return connector

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
