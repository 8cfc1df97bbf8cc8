"""LMCache's server as a program that nobody but its own user reaches.

    lmcache-xpu-server SOCKET HOST:PORT [LMCache's options]

`lmcache server` answers workers at a TCP port, and its HTTP interface empties the cache and more
for everybody who reaches it. Here workers use a socket file, and HTTP has two pages: /healthcheck,
which asks the server through that socket, and /metrics. The file SOCKET.http holds the address of
these pages. Exit status 2: SOCKET lies where another user could answer in the server's place.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import MetricsHandler

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.server.server_socket import SCHEME, make_directory

MODULE = "lmcache_xpu.server.server_module"
ANSWER_S = 5.0  # that a working server takes at most, also while it stores


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    socket = Path(sys.argv[1])
    host, _, port = sys.argv[2].rpartition(":")
    try:
        make_directory(socket)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    module = {"module_path": MODULE, "config": {"socket": str(socket)}}
    # Port 0: the one that LMCache insists on is closed before the server answers anything.
    sys.argv[1:] = [
        *("--host", "127.0.0.1", "--port", "0", "--server-module", json.dumps(module)),
        *sys.argv[3:],
    ]
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server, engine = _start()
    pages = ThreadingHTTPServer((host, int(port)), partial(_Pages, _health(f"{SCHEME}{socket}")))
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    shown = Path(f"{socket}.http")
    new = Path(f"{socket}.http.new")
    new.write_text("{}:{}".format(*pages.server_address[:2]))
    new.replace(shown)
    ended.wait()
    shown.unlink(missing_ok=True)
    server.close()
    engine.close()


def _start() -> tuple[Any, Any]:
    """Start LMCache's server by the options of this process; return it, and its engine."""
    from lmcache.v1.distributed.config import parse_args_to_config
    from lmcache.v1.mp_observability.config import parse_args_to_observability_config
    from lmcache.v1.multiprocess.config import (
        parse_args_to_coordinator_config,
        parse_args_to_mp_server_config,
    )
    from lmcache.v1.multiprocess.server import parse_args, run_cache_server

    arguments = parse_args()
    started: tuple[Any, Any] | None = run_cache_server(
        parse_args_to_mp_server_config(arguments),
        parse_args_to_config(arguments),
        parse_args_to_observability_config(arguments),
        return_engine=True,
        start_prometheus_http_server=False,  # it would listen on every address
        coordinator_config=parse_args_to_coordinator_config(arguments),
    )
    assert started is not None
    return started


def _health(url: str) -> Callable[[], bool]:
    """Return what asks the server at its socket, as a worker would, whether it answers."""
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client, lock = RequestClientFactory.create(url), threading.Lock()

    def answers() -> bool:
        with lock:
            try:
                return bool(client.ping(None).result(timeout=ANSWER_S))
            except Exception:  # of LMCache's transport: it names none
                return False

    return answers


class _Pages(MetricsHandler):
    """The two pages."""

    timeout = 10  # seconds that a client may be silent

    def __init__(self, answers: Callable[[], bool], *arguments: Any) -> None:
        self._answers = answers
        super().__init__(*arguments)

    def do_GET(self) -> None:  # noqa: N802 (the base class's name)
        """Answer with a page, or 404."""
        if self.path == "/metrics":
            super().do_GET()
            return
        status, body = HTTPStatus.NOT_FOUND, b"/healthcheck or /metrics\n"
        if self.path == "/healthcheck":
            status, body = HTTPStatus.SERVICE_UNAVAILABLE, b"no answer\n"
            if self._answers():
                status, body = HTTPStatus.OK, b"healthy\n"
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    main()
