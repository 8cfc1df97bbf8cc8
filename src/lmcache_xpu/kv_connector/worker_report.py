"""What a worker tells the scheduler's half after a step, by way of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from lmcache_xpu.kv_connector.epochs import WeightsChanged
from lmcache_xpu.kv_connector.kv_events import TierReport
from lmcache_xpu.kv_connector.load_policy import LoadSpeeds

__all__ = ["NOTHING", "WorkerReport"]


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """What one worker, or several, have to tell.

    Args:
        tiers: what changed in their tiers; None if nothing did, or nobody wants to know.
        weights: their weights changed; None if not.
        speeds: of loads that requests have waited for.
        step: number of the step that has ended; None if nobody asks.
    """

    tiers: TierReport | None = None
    weights: WeightsChanged | None = None
    speeds: LoadSpeeds = field(default_factory=LoadSpeeds)
    step: int | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This one's report and that of another worker."""
        assert isinstance(other, WorkerReport)
        tiers, weights = self.tiers or other.tiers, self.weights or other.weights
        if self.tiers is not None and other.tiers is not None:
            tiers = self.tiers.aggregate(other.tiers)
        if self.weights is not None and other.weights is not None:
            weights = self.weights.aggregate(other.weights)
        speeds = LoadSpeeds(*map(_slower, self.speeds, other.speeds))
        return WorkerReport(tiers, weights, speeds, self.step)


NOTHING = WorkerReport()


def _slower(a: float | None, b: float | None) -> float | None:
    return min((speed for speed in (a, b) if speed is not None), default=None)
