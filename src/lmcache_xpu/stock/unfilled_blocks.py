"""Blocks that loads left unfilled: vLLM recomputes them, and nothing is stored from them.

The worker's half of the connector owns the one record of a worker; LMCache's GPU connector
reports to it. What the engine computes in the step of a failed load, from blocks that hold
anything, would else be stored under keys that promise the right content. With asynchronous
scheduling a request goes on for one more step before the scheduler hears of the failure, and what
that step computes is wrong as well: a block counts as unfilled until it is given to a request anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lmcache_xpu.metrics import LOAD_CPU, Flow, fallback
from lmcache_xpu.transfer.slots import blocks_of

__all__ = ["UnfilledBlocks", "log_failure"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class UnfilledBlocks:
    """IDs of unfilled blocks.

    Called by the engine's thread.

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

    def add_slots(self, slots: torch.Tensor) -> None:
        """Add the blocks of slots that a load did not write.

        Args:
            slots: slot mapping of the missing tokens, on the host.
        """
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

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks by their IDs."""
        self._unreported.update(blocks)

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

    def settle(self) -> None:
        """Count the blocks that were added: from now on nothing is stored from them."""
        self._settle(self._unreported)

    def take(self) -> set[int]:
        """Return the blocks that vLLM has not heard of, once."""
        blocks, self._unreported = self._unreported, set()
        self._settle(blocks)
        return blocks

    def share(self, union: Callable[[set[int]], set[int]]) -> None:
        """Count what other ranks' loads left unfilled as well: those ranks report it to vLLM.

        Args:
            union: of a set of each rank, returns all of them.
        """
        self._unfilled |= union(self._unfilled)

    def _settle(self, blocks: set[int]) -> None:
        if blocks - self._unfilled:
            fallback("load")
        self._unfilled |= blocks

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
