"""The package's own metrics; on the engine's /metrics when PROMETHEUS_MULTIPROC_DIR is set.

    lmcache_xpu_bytes_total      {direction, tier}          moved
    lmcache_xpu_tokens_total     {direction, tier}          the tokens that these bytes are of
    lmcache_xpu_seconds_total    {direction, tier}          that the moves took
    lmcache_xpu_errors_total     {direction, tier, reason}  moves that failed
    lmcache_xpu_fallbacks_total  {reason}                   loads that ended in recomputing
    lmcache_xpu_disk_used_bytes, lmcache_xpu_disk_limit_bytes

Direction is `store` or `load`. Tier `cpu` is between the engine's KV cache and host memory, `disk`
between host memory and files, `shared` between host memory and a Valkey or Redis server; so a load
from the latter two counts in `cpu` as well. The engine runs in processes of its own: `serve` gives
them all one directory, where prometheus_client keeps its files and from which vLLM's server sums
them up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import Counter, Gauge

__all__ = [
    "DISK_LIMIT_BYTES",
    "DISK_USED_BYTES",
    "LOAD_CPU",
    "LOAD_DISK",
    "LOAD_SHARED",
    "STORE_CPU",
    "STORE_DISK",
    "STORE_SHARED",
    "Flow",
    "Stopwatch",
    "fallback",
]

_LABELS = ("direction", "tier")
_DIRECTIONS: tuple[Literal["store"], Literal["load"]] = ("store", "load")
_BYTES = Counter("lmcache_xpu_bytes_total", "Bytes of KV cache moved.", _LABELS)
_TOKENS = Counter("lmcache_xpu_tokens_total", "Tokens whose KV cache was moved.", _LABELS)
_SECONDS = Counter("lmcache_xpu_seconds_total", "Seconds that moves took.", _LABELS)
_ERRORS = Counter("lmcache_xpu_errors_total", "Moves that failed.", (*_LABELS, "reason"))
_FALLBACKS = Counter("lmcache_xpu_fallbacks_total", "Loads that ended in recomputing.", ("reason",))

# Of all processes, each of which has a directory of its own.
DISK_USED_BYTES = Gauge(
    "lmcache_xpu_disk_used_bytes", "Bytes that the disk tier holds.", multiprocess_mode="sum"
)
DISK_LIMIT_BYTES = Gauge(
    "lmcache_xpu_disk_limit_bytes", "Bytes that the disk tier may hold.", multiprocess_mode="sum"
)


class Flow:
    """What moves in one direction between two places. Labels are looked up once, here."""

    def __init__(
        self,
        direction: Literal["store", "load"],
        tier: Literal["cpu", "disk", "shared"],
        reasons: tuple[str, ...] = (),
    ) -> None:
        self._labels = (direction, tier)
        for reason in reasons:  # the first failure is an increase only where there was a zero
            _ERRORS.labels(direction, tier, reason)
        self._bytes = _BYTES.labels(*self._labels)
        self._tokens = _TOKENS.labels(*self._labels)
        self._seconds = _SECONDS.labels(*self._labels)

    def moved(self, seconds: float, *, size_bytes: int, tokens: int) -> None:
        """Count a move that has ended well."""
        self._bytes.inc(size_bytes)
        self._tokens.inc(tokens)
        self._seconds.inc(seconds)

    def failed(self, reason: str) -> None:
        """Count a move that has failed; `reason` is one of a few words, or an error's class."""
        _ERRORS.labels(*self._labels, reason).inc()


class Stopwatch:
    """Adds up the seconds of several spans."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time until the block ends."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


def fallback(reason: str) -> None:
    """Count a request whose load ended in recomputing."""
    _FALLBACKS.labels(reason).inc()


STORE_CPU, LOAD_CPU = (Flow(d, "cpu", ("incomplete", "RuntimeError")) for d in _DIRECTIONS)
STORE_DISK = Flow("store", "disk", ("behind", "crowded", "full", "io"))
LOAD_DISK = Flow("load", "disk", ("corrupt", "io", "pool_full"))
STORE_SHARED = Flow("store", "shared", ("behind", "full", "refused", "server"))
LOAD_SHARED = Flow("load", "shared", ("corrupt", "pool_full", "server"))
_FALLBACKS.labels("load")
