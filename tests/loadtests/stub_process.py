"""The stub server, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


class StubServer:
    """One that runs."""

    def __init__(self, process):
        self.process = process
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def read(self, path):
        """What it says about itself."""
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=10) as response:
            return json.load(response)

    def stop(self):
        """End it."""
        self.process.terminate()
        self.process.wait(10)
        self.process.stdout.close()


@contextmanager
def stub_server(*options):
    """A stub server with these options."""
    command = [sys.executable, str(HERE / "stub.py"), *options]
    server = StubServer(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        yield server
    finally:
        server.stop()
