"""What the connector reports to vLLM beside the KV cache: stats, KV events, sources of hits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu import connector_stats, lmcache_engine
from lmcache_xpu.connector_stats import ConnectorStats, PromMetrics
from lmcache_xpu.kv_events import TierReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.residency import Residency
    from lmcache_xpu.scheduler_side import SchedulerSide

__all__ = ["ReportingConnector"]


class ReportingConnector(LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
    """LMCache's connector, with vLLM's hooks for what a connector tells of itself."""

    _served: bool
    _scheduler: SchedulerSide | None
    _residency: Residency | None = None  # the worker's, where the engine publishes KV events

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a chunk that was not stored is computed again, whatever `kv_role` says."""
        return False

    # Stats

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call. The scheduler's half counts nothing."""
        return connector_stats.take() if self._served and self._scheduler is None else None

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

    def build_connector_worker_meta(self) -> TierReport | None:
        """What has changed in this worker's tiers since the last call."""
        if self._residency is None or not (changes := self._residency.take()):
            return None
        return TierReport(lmcache_engine.storing_workers(self._lmcache_engine), changes)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and self._scheduler.events is not None:
            if isinstance(report, TierReport):
                self._scheduler.events.report(report)
        elif not self._served:
            super().update_connector_output(connector_output)

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
