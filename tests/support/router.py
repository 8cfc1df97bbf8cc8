"""vllm-router in front of two servers that stand in for engines, hearing the events of each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lmcache_xpu.harness.engine_process import free_port

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Stub(BaseHTTPRequestHandler):
    """Answers with the port that it listens on."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        text = str(self.server.server_address[1])
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        self._reply({"id": "x", "object": "text_completion", "model": "m", "choices": [choice]})

    def _reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Router:
    """A router with two engines, by whose events it decides."""

    def __init__(self, port: int, ports: list[int], publishers: list[Any], log: Path) -> None:
        self._port, self._ports, self._publishers, self._log = port, ports, publishers, log

    def publish(self, engine: int, events: Sequence[Any]) -> None:
        """As an engine does after a step."""
        from vllm.distributed.kv_events import KVEventBatch

        self._publishers[engine].publish(KVEventBatch(ts=time.time(), events=list(events)))

    def ask(self, tokens: list[int]) -> tuple[int, int]:
        """The engine that a prompt is sent to, and its tokens that the router counts as there."""
        body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 1}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            port = int(json.load(answer)["choices"][0]["text"])
        decisions = re.findall(
            r"credited_prefix_tokens=(\d+)", COLOURS.sub("", self._log.read_text())
        )
        return self._ports.index(port), int(decisions[-1])

    def learns(self, engine: int, events: Sequence[Any], tokens: list[int], indexed: Any) -> bool:
        """Publish until the router answers so for a prompt: a subscription takes a moment."""
        for _ in range(20):
            self.publish(engine, events)
            time.sleep(0.25)
            if indexed(*self.ask(tokens)):
                return True
        return False


@contextmanager
def router(block_tokens: int) -> Iterator[Router]:
    from vllm.distributed.kv_events import ZmqEventPublisher

    class Publisher(ZmqEventPublisher):
        """vLLM's, which connects to an address unless it is that of all interfaces."""

        @staticmethod
        def _is_bind_endpoint(endpoint: str) -> bool:
            return True

    directory = Path(tempfile.mkdtemp())
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Stub) for _ in range(2)]
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in servers]
    publishers = [Publisher(0, endpoint) for endpoint in endpoints]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = [server.server_address[1] for server in servers]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    port, log = free_port(), directory / "log"
    pairs = zip(urls, endpoints, strict=True)
    sources = [("--kv-event-source", f"{url}={endpoint}") for url, endpoint in pairs]
    command = [
        str(Path(sys.executable).with_name("vllm-router")),
        *("--port", str(port), "--policy", "kv_aware", "--worker-urls", *urls),
        *(word for source in sources for word in source),
        *("--kv-event-block-size", str(block_tokens), "--kv-event-model", "m"),
        *("--prometheus-port", str(free_port()), "--log-level", "debug"),
        *("--worker-startup-check-interval", "1"),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(120):
            if "Starting server on" in log.read_text():
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.25)
        yield Router(port, ports, publishers, log)
    finally:
        process.terminate()
        process.wait(20)
        for publisher in publishers:
            publisher.shutdown()
        for server in servers:
            server.shutdown()
            server.server_close()
        shutil.rmtree(directory)
