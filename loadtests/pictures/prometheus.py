"""A Prometheus that watches one engine, and what it answers."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness.engine_process import free_port

__all__ = ["SCRAPE_S", "Prometheus", "find_program"]

CONFIG = Path(__file__).parents[2] / "monitoring/prometheus.yaml"
SCRAPE_S = 5.0  # of that file
START_S = 60.0
STOP_S = 10.0


def find_program(name: str) -> str:
    """Return the path of Prometheus.

    Raises:
        SettingsError: it is not there.
    """
    if (path := shutil.which(name)) is None:
        raise SettingsError(
            f"no program {name}",
            "Prometheus, which keeps the engine's metrics while the load runs",
            "Install it (Debian: `apt-get install prometheus`), or name it: --prometheus PATH.",
        )
    return path


class Prometheus:
    """A server's answers.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    @classmethod
    @contextmanager
    def watching(cls, engine: str, *, program: str, folder: Path) -> Iterator[Prometheus]:
        """Run a Prometheus with the stack's intervals, which scrapes one engine.

        Args:
            engine: host and port.
            program: the path of Prometheus.
            folder: for its files.
        """
        config = {
            "global": yaml.safe_load(CONFIG.read_text())["global"],
            "scrape_configs": [
                {"job_name": "lmcache-xpu", "static_configs": [{"targets": [engine]}]}
            ],
        }
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
            )
        try:
            prometheus = cls(f"http://{address}")
            prometheus._wait()
            yield prometheus
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def range(
        self, expression: str, *, start: float, end: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Return the series that a query has over a time, each with labels and values."""
        query = {"query": expression, "start": start, "end": end, "step": step_s}
        answer = self._http.post("/api/v1/query_range", data=query).json()
        if answer["status"] != "success":
            raise EngineError(
                f"Prometheus refuses {expression}: {answer['error']}",
                "a query that it answers",
                "Mend the dashboard's file.",
            )
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if self._http.get("/-/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise EngineError(
            f"no answer from Prometheus for {START_S:.0f} s",
            "a server that answers",
            "prometheus.log has the cause.",
        )
