"""Faults of connectors that were reported in public, planted by their mechanism.

`PlantedConnector` is ours, exact until `plant` names a fault. Both run in an engine's process.

- stored early (vllm#31210): where several requests are computed at once, stores copy blocks before
  the step has computed them.
- stored halfway (vllm#45704): stores are not ordered behind the step, and copy the later layers as
  they were before it.
- rows half as wide (LMCache#4463): keys and values lie in one row, and loads step through the rows
  as if each had the keys alone.
- other group's pages (LMCache#4247): loads into a hybrid model's attention read a page as that of
  another group, whose parts lie elsewhere.
- earlier state (vllm#53505): with a connector attached, vLLM's own cache resumes from a state of
  another boundary than that of the attention, although nothing is loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from lmcache_xpu.connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.transfer.gather_scatter import TorchTransfer

EARLY, HALFWAY = "stored early", "stored halfway"
ROWS, PAGES, STATE = "rows half as wide", "other group's pages", "earlier state"
FAULTS = {
    EARLY: "vllm#31210",
    HALFWAY: "vllm#45704",
    ROWS: "LMCache#4463",
    PAGES: "LMCache#4247",
    STATE: "vllm#53505",
}
planted = ["sound"]


class PlantedConnector(LMCacheXPUServerConnector):
    """Ours, whose stores may copy what was there before the step."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        layers = ([c] if isinstance(c, torch.Tensor) else list(c) for c in kv_caches.values())
        self.layers = list(layers)
        self.before: list[list[torch.Tensor]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.before = [[t.clone() for t in layer] for layer in self.layers]
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        step = self._get_connector_metadata()
        several = len({chunks.request_id for chunks in step.stores}) > 1
        first = {EARLY: 0, HALFWAY: len(self.layers) // 2}.get(planted[0])
        if first is None or (planted[0] == EARLY and not several):
            super().wait_for_save()
            return
        self.worker_half.drain()
        pairs = [
            pair
            for layer, before in zip(self.layers[first:], self.before[first:], strict=True)
            for pair in zip(layer, before, strict=True)
        ]
        computed = [tensor.clone() for tensor, _ in pairs]
        for tensor, before in pairs:
            tensor.copy_(before)
        super().wait_for_save()
        self.worker_half.drain()
        for (tensor, _), content in zip(pairs, computed, strict=True):
            tensor.copy_(content)


def plant(engine: Any, fault: str) -> None:
    """Plant a fault in this process; any other name plants none."""
    planted[0] = fault
    if not hasattr(TorchTransfer, "sound_scatter"):
        _plant_rows()
        _plant_pages()
        _plant_state(engine)


def _plant_rows() -> None:
    TorchTransfer.sound_scatter = scatter = TorchTransfer.scatter

    def half_as_wide(self: Any, rows: Any, source: torch.Tensor, first_layer: int = 0) -> None:
        if planted[0] == ROWS:
            width, flat = source.shape[-1], source.contiguous().flatten(-2)
            source = flat.unfold(-1, width, width // 2)[..., : source.shape[-2], :].contiguous()
        scatter(self, rows, source, first_layer)

    TorchTransfer.scatter = half_as_wide


def _plant_pages() -> None:
    load = GroupCopies.load

    def of_another_group(self: Any, chunks: Any, objects: Any) -> Any:
        handles = load(self, chunks, objects)
        if planted[0] == PAGES and not self.group.recurrent:
            for part in self.parts:
                for (pages,) in part.stager.view.tensors:
                    for block in (b for ids in chunks for b in ids if b):
                        page = pages[block]
                        halves = page.flatten().view(2, -1)
                        page.copy_(halves.T.reshape(page.shape))
        return handles

    GroupCopies.load = of_another_group


def _plant_state(engine: Any) -> None:
    manager, config = engine.scheduler.kv_cache_manager, engine.scheduler.kv_cache_config
    real = manager.get_computed_blocks_for_connector
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]

    def computed(request: Any) -> Any:
        blocks, tokens, *more = real(request)
        size = engine.scheduler.block_size
        if planted[0] == STATE and tokens > size:
            rows = [list(row) for row in blocks.blocks]
            for group in (number for number, kind in enumerate(kinds) if kind == "MambaSpec"):
                earlier = request.block_hashes[tokens // size - 2]
                state = manager.block_pool.get_cached_block(earlier, [group])
                if state:
                    rows[group][-1] = state[0]
            blocks = manager.create_kv_cache_blocks(tuple(rows))
        return blocks, tokens, *more

    manager.get_computed_blocks_for_connector = computed
