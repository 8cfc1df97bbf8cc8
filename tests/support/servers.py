"""A real Valkey or Redis for tests of the shared tier."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis

from lmcache_xpu.harness.engine_process import free_port

PASSWORD = "s3cret"
PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(PROGRAM is None, reason="no valkey-server or redis-server here")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A new certificate of 127.0.0.1, which is its own authority, and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "tls.crt", folder / "tls.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", *files[:1], "-keyout", *files[1:]]
    subprocess.run([*command.split(), *where], check=True, capture_output=True)
    return files


class Server:
    """On loopback, with a password; keeps nothing on disk."""

    def __init__(self, authority: Path | None = None):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        tls = {"ssl": True, "ssl_ca_certs": str(authority)} if authority else {}
        self.client = redis.Redis("127.0.0.1", port=self.port, password=PASSWORD, **tls)
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
