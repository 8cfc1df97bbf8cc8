"""The GPU connectors of an engine, whose failed loads become blocks to recompute.

An exception of a connector would end vLLM's engine, and LMCache would never give up its references
to the chunks of the load. So here it ends: the tokens that did not arrive go to `unfilled`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.cache_engine.loans import Lender, order_of
from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.versions.lmcache import VLLMPagedMemLayerwiseXPUConnector as LMCacheLayerwise

__all__ = ["LayerwiseConnector", "StandardConnector"]

Layers = Generator[None, Sequence[MemoryObj] | None, None]


class StandardConnector(VLLMPagedMemXPUConnectorV2):
    """The standard connector of one engine.

    `unfilled` is set by who makes the connector; `lender` where other ranks use its CPU tier.
    """

    unfilled: UnfilledBlocks
    lender: Lender | None = None

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Load chunks, here and where others hold the same; raises nothing, see the module."""
        try:
            if self.lender is not None:
                self.lender.lend(order_of(kwargs), kwargs["req_id"], memory_objs, starts, ends)
            super().batched_to_gpu(memory_objs, starts, ends, **kwargs)
        except Exception as error:
            self.unfilled.add_load(error, kwargs, starts[0])


class LayerwiseConnector(VLLMPagedMemLayerwiseXPUConnector):
    """The layerwise connector of one engine.

    `unfilled` is set by who makes the connector. `spans` are the chunks' first tokens, and those
    after their last, of the load that began last; the engine sets it before, for the case that
    LMCache begins none.
    """

    unfilled: UnfilledBlocks
    spans: Sequence[Sequence[int]]

    def batched_to_gpu(self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> Layers:
        """Load a request layer by layer; raises nothing, see the module.

        After an error the generator takes the other layers' chunks and drops them.
        """
        self.spans = starts, ends
        load: Layers | None = super().batched_to_gpu(starts, ends, **kwargs)
        memory_objs = None
        for _ in range(len(self.groups) + 2):
            if load is not None:
                try:
                    load.send(memory_objs)
                except Exception as error:
                    self.unfilled.add_load(error, kwargs, starts[0])
                    load = None
            memory_objs = yield


# LMCache takes layerwise connectors of a fixed list of classes alone.
LMCacheLayerwise.register(LayerwiseConnector)
