"""A real `lmcache server` on loopback, which tests kill, stop and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.scripts import environment

from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.launch.cache_server import server_command
from lmcache_xpu.launch.settings import Settings

START_S = 120


class CacheServer:
    """Listens on the same port each time it is started.

    Args:
        log: file for its output, which goes on where it ended.
        settings: of the engine that it is for.
    """

    def __init__(self, log: Path, **settings: Any) -> None:
        self.ports = [free_port() for _ in range(3)]
        self.url = f"tcp://127.0.0.1:{self.ports[0]}"
        self.log = log
        values = {"model": "any", "device": "cpu", "cpu_gib": 0.25, "cache": "server", **settings}
        self._command = server_command(Settings.load(values), self.ports)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
        end = time.monotonic() + START_S
        while not _listens(self.ports[0]):
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

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
