"""What the connector reports to vLLM beside the KV cache: stats, KV events, sources of hits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu.cache_engine import health
from lmcache_xpu.kv_connector import stats
from lmcache_xpu.kv_connector.kv_events import TierReport
from lmcache_xpu.kv_connector.stats import ConnectorStats, PromMetrics
from lmcache_xpu.kv_connector.worker_report import WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.epochs import WeightsChanged, WorkerEpoch
    from lmcache_xpu.kv_connector.scheduler import SchedulerSide
    from lmcache_xpu.tiers.residency import Residency

__all__ = ["ReportingConnector"]


class ReportingConnector(LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
    """LMCache's connector, with vLLM's hooks for what a connector tells of itself."""

    _served: bool
    _scheduler: SchedulerSide | None
    _residency: Residency | None = None  # the worker's, where the engine publishes KV events
    _epoch: WorkerEpoch | None = None  # the worker's

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a chunk that was not stored is computed again, whatever `kv_role` says."""
        return False

    # Stats

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call. The scheduler's half counts nothing."""
        return stats.take() if self._served and self._scheduler is None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Stats as another process sent them; empty ones without `data`."""
        return ConnectorStats() if data is None else ConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """What adds stats to this process' /metrics; see `connector_stats`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # KV events: by way of the workers' metadata, which MultiConnector passes on as well

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """LMCache's own events, on devices that are not served."""
        return None if self._served else super().get_kv_connector_kv_cache_events()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What has changed in this worker since the last call: its tiers, its weights."""
        tiers = None
        if self._residency is not None and (changes := self._residency.take()):
            tiers = TierReport(health.storing_workers(self._lmcache_engine), changes)
        weights = self.weights_changed
        return None if tiers is None and weights is None else WorkerReport(tiers, weights)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        if self._scheduler is None:
            super().update_connector_output(connector_output)
        elif isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport):
            self._scheduler.hear(report)

    @property
    def weights_changed(self) -> WeightsChanged | None:
        """Whether this worker's weights changed since it heard of an epoch; see `epochs`."""
        return None if self._epoch is None else self._epoch.changed

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of the tiers since the last call; see `kv_events`."""
        if not self._served:
            return super().take_events()  # type: ignore[no-any-return]
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return self._scheduler.events.take()

    # Hits

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tiers supply a request's tokens, as far as this process knows."""
        sources: dict[CacheHitSource, int] = super().get_external_cache_hit_sources(
            request, num_external_tokens
        )
        if self._scheduler is None or not sources:
            return sources
        return self._scheduler.hit_sources(request.request_id, num_external_tokens) or sources
