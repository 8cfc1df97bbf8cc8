"""The server's metrics, read once a second while the load runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import gevent
import orjson
from geventhttpclient.client import HTTPClient
from geventhttpclient.response import HTTPParseError
from prometheus_client.parser import text_string_to_metric_families

from loadtests.recorder import RunClock

__all__ = ["ENGINE_TOKENS", "METRICS", "STARTED", "Scraper", "samples"]

METRICS = "metrics.jsonl"
ENGINE_TOKENS = "engine_cache_tokens"
STARTED = "process_start_time_seconds"
EVERY_S = 1.0
TIMEOUT_S = 5.0
# What is kept of a page that has hundreds of lines. The parser is too slow for all of them: it
# would make the client late.
PREFIXES = (
    "vllm:prefix_cache_",
    "vllm:external_prefix_cache_",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:num_requests_",
    "vllm:num_preemptions_total",
    "lmcache_mp_lookup_",
    "lmcache_mp_l1_memory_usage_bytes",
    "lmcache_xpu_",
    "hw_gpu_utilization_ratio",
    "hw_memory_utilization_ratio",
    STARTED,
)


def samples(page: str) -> dict[str, float]:
    """The values of a page of metrics, summed over engines; other labels stay in the name."""
    lines = [line for line in page.splitlines() if line.startswith(PREFIXES)]
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            if sample.name == "vllm:cache_config_info":  # its labels are what it says
                held = [sample.labels.get(k, "") for k in ("num_gpu_blocks", "block_size")]
                if all(number.isdigit() for number in held):
                    tokens = float(held[0]) * float(held[1])
                    samples[ENGINE_TOKENS] = samples.get(ENGINE_TOKENS, 0.0) + tokens
                continue
            labels = {k: v for k, v in sample.labels.items() if k in ("direction", "tier")}
            name = sample.name + "".join(f" {k}={v}" for k, v in sorted(labels.items()))
            samples[name] = samples.get(name, 0.0) + sample.value
    if not any(name.startswith("vllm:") for name in samples):
        samples.pop(STARTED, None)  # of an exporter
    return samples


class Scraper:
    """Reads pages of metrics until it is closed, and notices when the server is away.

    Args:
        host: the server; its page is /metrics.
        pages: further pages, as whole addresses.
        clock: of the run.
        directory: where to write.
    """

    def __init__(
        self, host: str, pages: Iterable[str], *, clock: RunClock, directory: Path
    ) -> None:
        self._clock = clock
        self._pages = [_Page(host.rstrip("/") + "/metrics"), *(_Page(url) for url in pages)]
        self._file: IO[bytes] = (directory / METRICS).open("ab")
        self.away_since_s: float | None = None
        self._greenlet = gevent.spawn(self._run)

    def once(self) -> None:
        """Read all pages now."""
        at_s = self._clock.now()
        row: dict[str, float] = {"at_s": at_s}
        for page in self._pages:
            row |= page.read()
        server = self._pages[0]
        if not server.away:
            self.away_since_s = None
        elif self.away_since_s is None:
            self.away_since_s = at_s
        if len(row) > 1:
            self._file.write(orjson.dumps(row) + b"\n")
            self._file.flush()

    def away_s(self) -> float:
        """The seconds since the server last accepted a connection."""
        return 0.0 if self.away_since_s is None else self._clock.now() - self.away_since_s

    def close(self) -> None:
        """Read a last time and stop."""
        self._greenlet.kill()
        self.once()
        self._file.close()

    def _run(self) -> None:
        while True:
            self.once()
            gevent.sleep(EVERY_S)


class _Page:
    def __init__(self, url: str) -> None:
        self._path = urlsplit(url).path
        self._http = HTTPClient.from_url(
            url, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )
        self.away = False

    def read(self) -> dict[str, float]:
        """Its values; none when it is away, busy for too long, or has no metrics."""
        self.away = False
        try:
            response = self._http.get(self._path)
            page = response.read().decode()
            return samples(page) if response.status_code == 200 else {}
        except TimeoutError:
            return {}  # busy: requests in flight tell more than this page would
        except (OSError, HTTPParseError):
            self.away = True
            return {}
