"""What the ranks that share out a model's heads tell each other, beside vLLM's own exchanges.

A load that fails on one rank spoils what the step computes on all of them: each layer ends with a
sum over the ranks. vLLM hears of the failure after the step, when the others have stored that.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import distributed

__all__ = ["RankGroup"]


class RankGroup:
    """The ranks of a tensor parallel group. Called by the engine's thread, by all in one order.

    Args:
        group: vLLM's, of processes that talk through the host. An error of it, as after the end of
            another rank, comes through.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def union(self, numbers: Collection[int]) -> set[int]:
        """Return the numbers of all ranks; waits until each of them has asked.

        One small exchange where none has any, two more where one has.
        """
        most = torch.tensor([len(numbers)])
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self._group)
        if not most.item():
            return set()
        gathered: list[list[int]] = [[]] * self._group.size()
        distributed.all_gather_object(gathered, list(numbers), group=self._group)
        return set().union(*gathered)
