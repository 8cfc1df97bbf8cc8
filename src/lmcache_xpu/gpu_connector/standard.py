"""The standard connector: whole chunks of all layers between vLLM's KV cache and LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.gpu_connector.base import PagedMemConnector


class VLLMPagedMemXPUConnectorV2(PagedMemConnector):
    """Copies whole chunks, KV_2LTD `[2, layers, tokens, hidden]` or KV_MLA_FMT `[1, ...]`."""

    FORMAT = MemoryFormat.KV_2LTD
    LAYERWISE = False

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load one chunk; see `batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store one chunk; see `batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    @torch.inference_mode()
    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Load chunks into the engine's KV cache, from a memory object each; else see `plan`.

        The copies run behind what the engine has enqueued and before what it enqueues next; host
        memory may be reused as soon as this returns. Raises as `plan` and `memory`; nothing was
        changed then.
        """
        stager, plan = self.plan(starts, ends, kwargs, loading=True)
        memory = self.memory(stager, memory_objs, starts, ends, loading=True)
        stager.follow_engine()  # blocks may have been freed by a step that is running
        with stager.whole():
            done = stager.load(plan, memory)
        done.wait()  # the engine's stream
        done.synchronize()  # LMCache gives up the host memory when this returns

    @torch.inference_mode()
    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Store chunks from the engine's KV cache; complete on the host when this returns.

        Arguments and errors as of `batched_to_gpu`. Negative slots leave their host memory as is.
        """
        stager, plan = self.plan(starts, ends, kwargs, loading=False)
        memory = self.memory(stager, memory_objs, starts, ends, loading=False)
        stager.follow_engine()
        with stager.whole():
            done = stager.store(plan, memory).done
        done.synchronize()  # LMCache publishes it at once
