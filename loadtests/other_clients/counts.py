"""What a server has counted while a client ran."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Counts", "Watch", "counts_of"]

LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server has counted so far: first tokens, their seconds, and tokens of prompts."""

    first_tokens: float = 0.0
    first_token_s: float = 0.0
    prompt: float = 0.0
    device: float = 0.0
    external: float = 0.0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.first_tokens - before.first_tokens,
            self.first_token_s - before.first_token_s,
            self.prompt - before.prompt,
            self.device - before.device,
            self.external - before.external,
        )

    @property
    def mean_s(self) -> float | None:
        """The mean time to first token."""
        return self.first_token_s / self.first_tokens if self.first_tokens else None


NAMES = {
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "vllm:time_to_first_token_seconds_sum": "first_token_s",
    "vllm:prefix_cache_queries_total": "prompt",
    "vllm:prefix_cache_hits_total": "device",
    "vllm:external_prefix_cache_hits_total": "external",
}


def counts_of(page: str) -> Counts:
    """Read a page of metrics."""
    prefixes = (*NAMES, "# TYPE")
    values = dict.fromkeys(NAMES.values(), 0.0)
    lines = [line for line in page.splitlines() if line.startswith(prefixes)]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if name := NAMES.get(sample.name):
                values[name] += sample.value
    return Counts(**values)


class Watch:
    """Reads a server's counters while a client runs, to leave its warm-up out."""

    def __init__(self, url: str, *, warm_up: int) -> None:
        self._url, self._warm_up = url, warm_up
        self._over = threading.Event()
        self._begin = self._warm = self._read()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def counted(self) -> Counts:
        """Return what was counted after the warm-up: but for hits, which a warm-up has none of."""
        end = self._read()
        times, tokens = end - self._warm, end - self._begin
        return Counts(
            times.first_tokens, times.first_token_s, tokens.prompt, tokens.device, tokens.external
        )

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = self._read()
            if now.first_tokens - self._begin.first_tokens > self._warm_up:
                return
            self._warm = now

    def _read(self) -> Counts:
        return counts_of(httpx.get(f"{self._url}/metrics", timeout=30, trust_env=False).text)
