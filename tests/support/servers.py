"""A real Valkey or Redis for tests of the shared tier."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
import redis

from lmcache_xpu.harness.engine_process import free_port

PASSWORD = "s3cret"
PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(PROGRAM is None, reason="no valkey-server or redis-server here")


class Server:
    """On loopback, with a password; keeps nothing on disk."""

    def __init__(self):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client = redis.Redis(port=self.port, password=PASSWORD)
        self.process = None

    def start(self, *options):
        options = ["--port", str(self.port), "--requirepass", PASSWORD, "--save", "", *options]
        self.process = subprocess.Popen(
            [PROGRAM, "--bind", "127.0.0.1", *options], stdout=subprocess.DEVNULL
        )
        for _ in range(500):
            try:
                return self.client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
        return pytest.fail("the server did not start")

    def stop(self):
        self.process.kill()
        self.process.wait()

    def fill(self):
        """From now on it is full, and evicts nothing."""
        self.client.config_set("maxmemory-policy", "noeviction")
        self.client.config_set("maxmemory", self.client.info("memory")["used_memory"])
