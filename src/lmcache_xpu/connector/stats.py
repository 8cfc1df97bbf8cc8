"""The package's counters by way of vLLM: in its periodic log line, and on its /metrics.

Each step a worker hands vLLM what it counted. vLLM adds up its workers, and its API server logs the
sums of an interval as `KV Transfer metrics: ...`.

The numbers on /metrics are the ones of `metrics`, under their own names, once: where processes
share a directory (PROMETHEUS_MULTIPROC_DIR, as `serve` and several API servers have it) they are
there already. Elsewhere the API server adds what the workers counted to its own counters, which
nothing else does; an engine in the same process has counted there already.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_xpu import metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GIB = 2**30
COUNTS, LEVELS = "counts", "levels"
# Of counts that the log line shows in another unit: that, its size, and digits behind the point.
UNITS = {"bytes": ("mib", 2**20, 1), "seconds": ("s", 1, 4)}


def take() -> ConnectorStats | None:
    """What this process counted since the last call; None if nothing."""
    counts, levels = metrics.take()
    if not (counts or levels):
        return None
    return ConnectorStats({_this_process(): {COUNTS: counts, LEVELS: levels}})


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # untyped base
    """Counts and levels of an interval, by the process that made them.

    `data` is `{process: {"counts": {"bytes load cpu": 4096.0, ...}, "levels": {...}}}`.
    """

    def reset(self) -> None:
        """Begin another interval."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add what others counted, or what was counted later."""
        for process, theirs in other.data.items():
            ours = self.data.setdefault(process, {COUNTS: {}, LEVELS: {}})
            _add_up(ours[COUNTS], theirs[COUNTS])
            ours[LEVELS].update(theirs[LEVELS])
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows: the sums of all workers, without what is zero."""
        counts: dict[str, float] = {}
        levels: dict[str, float] = {}
        for stats in self.data.values():
            _add_up(counts, stats[COUNTS])
            _add_up(levels, stats[LEVELS])
        shown: dict[str, int | float] = {}
        for key, amount in sorted(counts.items()):
            kind, *flow = key.split(" ")
            unit, size, digits = UNITS.get(kind, (kind, 1, None))
            shown["_".join((*flow, unit))] = round(amount / size, digits)
        for key, value in sorted(levels.items()):
            shown[key.replace("_bytes", "_gib")] = round(value / GIB, 3)
        return shown


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # untyped base
    """Adds to the counters of this process what other processes counted."""

    def __init__(self, vllm_config: VllmConfig, metric_types: dict[Any, Any], *labels: Any) -> None:
        super().__init__(vllm_config, metric_types, *labels)
        shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        # With Ray, vLLM has other kinds of metrics, which its own page does not show.
        self._adds = not shared and metric_types[Counter] is Counter
        self._levels: dict[tuple[int, str], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what an engine's processes counted in a step."""
        for process, stats in transfer_stats_data.items():
            if not self._adds or process == _this_process():
                continue
            metrics.add(stats[COUNTS])
            self._levels.setdefault((engine_idx, process), {}).update(stats[LEVELS])
            for name in stats[LEVELS]:
                every = self._levels.values()
                metrics.LEVELS[name].gauge.set(sum(levels.get(name, 0.0) for levels in every))


class StatsHooks:
    """What vLLM asks a connector of stats."""

    role: KVConnectorRole

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call. The scheduler's half counts nothing."""
        return take() if self.role is KVConnectorRole.WORKER else None

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
        """What adds stats to this process' /metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _add_up(sums: dict[str, float], more: dict[str, float]) -> None:
    for key, amount in more.items():
        sums[key] = sums.get(key, 0.0) + amount


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
