"""Blocks that loads left unfilled: vLLM recomputes them, and nothing is stored from them.

What the engine computes from them would else be stored under keys that promise the right content.
With asynchronous scheduling a request goes on for one more step before the scheduler knows of the
failure, and that step is wrong as well: a block counts as unfilled until a request gets it anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from lmcache_xpu.metrics import LOAD_CPU, Flow, fallback
from lmcache_xpu.transfer.slots import blocks_of

__all__ = ["UnfilledBlocks", "log_failure"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class UnfilledBlocks:
    """IDs of unfilled blocks, of one worker. Called by the engine's thread.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._unreported: set[int] = set()
        self._unfilled: set[int] = set()

    def begin_step(self, new_blocks: frozenset[int]) -> None:
        """Take blocks, by their IDs, that a request was given since the last step for good ones."""
        self._unfilled -= new_blocks

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks by their IDs."""
        self._unreported.update(blocks)

    def add_slots(self, slots: torch.Tensor) -> None:
        """Add the blocks of slots `[tokens]`, on the host, that a load did not write."""
        self.add(blocks_of(slots, self._block_size))

    def add_load(self, cause: Exception | str, load: Mapping[str, Any], first: int) -> None:
        """Add the blocks of a load that failed, but those that the engine has itself; log why.

        Args:
            cause: of the failure.
            load: LMCache's keyword arguments of the load: `slot_mapping`, `vllm_cached_tokens`.
            first: number of the first token that did not arrive.
        """
        first = max(first, load.get("vllm_cached_tokens", 0))
        self.add_slots(load["slot_mapping"][first:])
        log_failure(LOAD_CPU, "A load failed and is computed instead", cause)

    def refuse(self, requests: Iterable[Any]) -> None:
        """Add what a step would load, before it does, and let it store nothing.

        Args:
            requests: LMCache's descriptions, which are changed.
        """
        for request in requests:
            spec, request.load_spec = request.load_spec, None
            if spec is not None and spec.can_load:
                first, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
                self.add_slots(request.slot_mapping[first:end])
            if request.save_spec is not None:
                request.save_spec.can_save = False

    def withhold(self) -> None:
        """Let nothing be stored from the blocks that were added."""
        if self._unreported - self._unfilled:
            fallback("load")
        self._unfilled |= self._unreported

    def take(self) -> set[int]:
        """Return the blocks that were added since the last call."""
        self.withhold()
        blocks, self._unreported = self._unreported, set()
        return blocks

    def share(self, group: distributed.ProcessGroup) -> None:
        """Withhold what other ranks' loads left unfilled as well; those ranks report it to vLLM.

        A load that fails on one rank spoils what the step computes on all: each layer ends with a
        sum over the ranks. Waits until all ranks have called: for one small exchange where no rank
        has a block, for two more where one has.

        Args:
            group: of processes that talk through the host. An error of it comes through.
        """
        most = torch.tensor([len(self._unfilled)])
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
        if most.item():
            gathered: list[set[int]] = [set()] * group.size()
            distributed.all_gather_object(gathered, self._unfilled, group=group)
            self._unfilled.update(*gathered)

    def spoil(self, slots: torch.Tensor) -> bool:
        """Return whether a request with this slot mapping has an unfilled block."""
        # Nearly always there is none, and a long prompt's slots take half a millisecond.
        return bool(self._unfilled) and not self._unfilled.isdisjoint(
            blocks_of(slots, self._block_size)
        )


def log_failure(flow: Flow, message: str, cause: Exception | str) -> None:
    """Count and log a transfer that failed, with the trace of an exception."""
    error = cause if isinstance(cause, Exception) else None
    flow.failed("incomplete" if error is None else type(error).__name__)
    logger.error("%s: %s (docs: troubleshooting#transfer-failed)", message, cause, exc_info=error)
