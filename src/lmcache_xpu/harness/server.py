"""A server that runs: its models and its page of metrics, read over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lmcache_xpu.errors import SettingsError

__all__ = ["Page", "Server"]

TIMEOUT_S = 10.0
ADDRESS = "the address of an engine, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of /metrics at one moment."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Page:
        """Read a page as Prometheus does.

        Raises:
            ValueError: it is none.
        """
        families = text_string_to_metric_families(text)
        return cls(tuple(sample for family in families for sample in family.samples))

    def has(self, prefix: str) -> bool:
        """Whether a metric's name begins so."""
        return any(sample.name.startswith(prefix) for sample in self.samples)

    def sum(self, name: str, **labels: str) -> float:
        """Add up the values of all engines and processes; 0.0 if there are none."""
        return sum(sample.value for sample in self.of(name, **labels))

    def of(self, name: str, **labels: str) -> Iterable[Sample]:
        """Return the samples of a metric that have these labels."""
        return (
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class Server:
    """A running engine's API server.

    Args:
        url: its address; an ending such as /v1 or /metrics is left out.
        api_key: the key that /v1 wants.

    Raises:
        SettingsError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none
            fits = False
        if not fits:
            raise SettingsError(f"--url {url}", ADDRESS)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def page(self) -> Page:
        """Return the metrics of a vLLM with this package.

        Raises:
            SettingsError: nobody answers, it is no vLLM, or one without this package.
        """
        response = self._get("/metrics")
        if response.status_code in (401, 403):
            raise SettingsError(
                f"{self.url}/metrics, which answers {response.status_code}",
                "a page that this key may read",
                "Put the key into LMCACHE_XPU_API_KEY.",
            )
        try:
            page = Page.parse(response.text) if response.is_success else Page(())
        except ValueError:
            page = Page(())
        if not page.has("vllm:"):
            raise SettingsError(
                f"{self.url}/metrics, which has no metrics of vLLM ({response.status_code})",
                ADDRESS,
                "A router has a page of its own: name the engine behind it.",
            )
        if not page.has("lmcache_xpu_"):
            raise SettingsError(
                f"{self.url}, a vLLM whose /metrics has nothing of lmcache-xpu",
                "an engine with offload on",
                "Start it with `lmcache-xpu serve`, which also sets PROMETHEUS_MULTIPROC_DIR.",
            )
        return page

    def models(self) -> list[str]:
        """Return the names of its models; none where it wants another key."""
        response = self._get("/v1/models")
        try:
            answer: dict[str, Any] = response.json() if response.is_success else {}
            return [str(model["id"]) for model in answer.get("data", [])]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []

    def _get(self, path: str) -> httpx.Response:
        try:
            return httpx.get(
                self.url + path, headers=self._headers, timeout=TIMEOUT_S, follow_redirects=True
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause = str(error) or type(error).__name__
            fix = "Is it running, and is that its port?"
            if "CERTIFICATE" in cause or "SSL" in cause:
                fix = "Name its certificate's authority in SSL_CERT_FILE, or check http and https."
            raise SettingsError(f"no answer from {self.url} ({cause})", ADDRESS, fix) from error
