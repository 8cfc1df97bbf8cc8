"""What a worker tells the scheduler's half after a step, by way of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from lmcache_xpu.kv_connector.epochs import WeightsChanged
from lmcache_xpu.kv_connector.kv_events import TierReport

__all__ = ["WorkerReport"]


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """What one worker, or several, have to tell.

    Args:
        tiers: what changed in their tiers; None if nothing did, or nobody wants to know.
        weights: their weights changed; None if not.
        loaded_per_s: tokens a second of a load that a request has waited for; None if none has
            ended.
    """

    tiers: TierReport | None = None
    weights: WeightsChanged | None = None
    loaded_per_s: float | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This one's report and that of another worker."""
        assert isinstance(other, WorkerReport)
        tiers, weights = self.tiers or other.tiers, self.weights or other.weights
        if self.tiers is not None and other.tiers is not None:
            tiers = self.tiers.aggregate(other.tiers)
        if self.weights is not None and other.weights is not None:
            weights = self.weights.aggregate(other.weights)
        speeds = [r.loaded_per_s for r in (self, other) if r.loaded_per_s is not None]
        return WorkerReport(tiers, weights, min(speeds, default=None))
