"""A socket that listens as LMCache's server does, and answers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq


@contextmanager
def listening(file: Path | None = None) -> Iterator[str]:
    """Yield its URL: of a socket file, or of a free port."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        server.bind(f"ipc://{file}" if file else "tcp://127.0.0.1:*")
        yield server.getsockopt_string(zmq.LAST_ENDPOINT)
