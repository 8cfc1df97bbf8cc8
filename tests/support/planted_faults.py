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
from lmcache_xpu.verify.asking import ask, clean
from lmcache_xpu.verify.cases import Pair

EARLY, HALFWAY = "stored early", "stored halfway"
ROWS, PAGES, STATE = "rows half as wide", "other group's pages", "earlier state"
FAULTS = {
    EARLY: "vllm#31210",
    HALFWAY: "vllm#45704",
    ROWS: "LMCache#4463",
    PAGES: "LMCache#4247",
    STATE: "vllm#53505",
}
AT_ONCE = "stored at once"
planted = ["sound"]


class PlantedConnector(LMCacheXPUServerConnector):
    """Ours, whose stores may copy what was there before the step."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        layers = ([c] if isinstance(c, torch.Tensor) else list(c) for c in kv_caches.values())
        self.layers = list(layers)
        self.before: list[list[torch.Tensor]] = []

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.before = [[t.clone() for t in layer] for layer in self.layers]
        super().handle_preemptions(kv_connector_metadata)

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
    if not hasattr(GroupCopies, "sound_load"):
        _plant_loads()
        _plant_state(engine)


def at_once(engine: Any) -> list[Pair]:
    """Store prompts at once, and ask each of them alone."""
    prompts = [engine.prompt(300) for _ in range(3)]
    clean(engine)
    pairs = []
    for stored in ask(engine, prompts):
        clean(engine)
        [asked] = ask(engine, [stored.prompt])
        pairs.append(Pair(AT_ONCE, stored, asked, alone=False))
    return pairs


def _plant_loads() -> None:
    GroupCopies.sound_load = load = GroupCopies.load

    def wrong(self: Any, chunks: Any, objects: Any) -> Any:
        handles = load(self, chunks, objects)
        if planted[0] not in (ROWS, PAGES) or self.group.recurrent:
            return handles
        for part in self.parts:
            for (pages,) in part.stager.view.tensors:
                for block in (b for ids in chunks for b in ids if b):
                    content = pages[block].flatten()
                    if planted[0] == ROWS:
                        rows, width = (
                            self.group.block_tokens,
                            len(content) // self.group.block_tokens,
                        )
                        content = content.unfold(0, width, width // 2)[:rows]
                    else:
                        content = content.view(2, -1).T
                    pages[block] = content.reshape(pages[block].shape)
        return handles

    GroupCopies.load = wrong


def _plant_state(engine: Any) -> None:
    manager, config = engine.scheduler.kv_cache_manager, engine.scheduler.kv_cache_config
    real = manager.get_computed_blocks
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

    manager.get_computed_blocks = computed
