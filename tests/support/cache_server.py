"""A real LMCache server as `serve` starts it, which tests kill, stop and start again."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.scripts import environment

from lmcache_xpu.launch.cache_server import answers, server_command
from lmcache_xpu.launch.settings import Settings

START_S = 120


class CacheServer:
    """Answers at the same socket each time it is started.

    Args:
        log: file for its output, which goes on where it ended.
        states: the engine's model has some.
        settings: of the engine that it is for.
    """

    def __init__(self, log: Path, *, states: bool = False, **settings: Any) -> None:
        # Not in a test's own directory: the path of a socket has to be short.
        self.socket = Path(tempfile.mkdtemp(prefix="lmcache-xpu-")) / "server.sock"
        self.url = self.address = f"ipc://{self.socket}"
        self.log = log
        values = {"model": "any", "device": "cpu", "cpu_gib": 0.25, "cache": "server", **settings}
        loaded = Settings.load(values)
        if states and "chunk_tokens" not in settings:
            # Chunks of one block, as `launch.model_support.with_layers` has them.
            loaded = loaded.model_copy(update={"chunk_tokens": 1})
        self._command = server_command(loaded, self.socket)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pages(self) -> str:
        """Address of its health and metrics."""
        return Path(f"{self.socket}.http").read_text()

    def metric(self, name: str) -> float:
        """The sum of a metric of the server itself, as it says at /metrics."""
        page = httpx.get(f"http://{self.pages}/metrics", timeout=10).text
        families = text_string_to_metric_families(page)
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, keeper: Sequence[str] = ()) -> None:
        """Start it, or a Python program that does, by its arguments."""
        command = [sys.executable, *keeper, *self._command] if keeper else self._command
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
        end = time.monotonic() + START_S
        while not answers(self.socket):
            if self._process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the server did not start\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def hang(self) -> None:
        """Let it answer nothing, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End it as its keeper does."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
