"""What scheduler and workers of LMCache's own engine tell each other of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Step", "WeightsChanged"]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # untyped base
    """One step of an engine.

    Args:
        lmcache: LMCache's description of what it loads and stores.
        new_blocks: IDs of the blocks that the step may write for the first time since a request
            got them, see `written_blocks`.
        unserved: IDs of blocks whose promised loads are not described; they count as failed.
        ended: IDs of requests that were looked up, and have ended before they were in any step.
    """

    lmcache: Any
    new_blocks: frozenset[int] = frozenset()
    unserved: frozenset[int] = frozenset()
    ended: tuple[str, ...] = ()


class WeightsChanged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """A worker reports to the scheduler that its weights have changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WeightsChanged:
        """Return the reports of several workers as one."""
        return self
