"""A server that answers what a test says."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Stub(ThreadingHTTPServer):
    """Answers on a loopback port of its own, and remembers what it was asked."""

    def __init__(
        self,
        answer: Callable[[str], object],
        status: Callable[[Any], int] = lambda _: 200,
        host: str = "127.0.0.1",
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        stub = self
        self.seen: list[tuple[str, str, dict[str, str]]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                stub.seen.append((self.command, self.path, headers))
                if "watch" in parse_qs(urlsplit(self.path).query):
                    time.sleep(1)  # an event stream without events
                reply = answer(self.path)
                body = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(status(reply))
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815  # the name that http.server calls

            def log_message(self, *_: object) -> None:
                pass

        super().__init__((host, 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless a client has left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        return self.server_address[1]
