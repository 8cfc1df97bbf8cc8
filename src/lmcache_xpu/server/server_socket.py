"""The socket file at which LMCache's server answers workers, in a directory of this user alone.

LMCache's server listens at a TCP port, which every user of the host and every container of the
network reaches. Whoever reaches it may store what others hit, and run code in older LMCache.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from lmcache_xpu.errors import SettingsError

SCHEME = "ipc://"
_LONGEST = 107  # bytes of a socket's path: sockaddr_un has 108


def make_directory(file: Path) -> None:
    """Make the directory of a socket, for this user alone, if it is missing.

    Raises SettingsError if another user can reach it, or the socket's path is too long.
    """
    if len(os.fsencode(file)) > _LONGEST:
        raise SettingsError(f"a socket at {file}", f"a path of at most {_LONGEST} bytes")
    file.parent.mkdir(mode=0o700, exist_ok=True)
    check_socket(f"{SCHEME}{file}")


def check_socket(url: str) -> None:
    """Raise SettingsError if another user could have put a server's socket file there."""
    if not url.startswith(SCHEME):
        return
    directory = Path(url.removeprefix(SCHEME)).parent
    expected = f"a directory of user {os.geteuid()} alone (mode 0700)"
    try:
        status = directory.lstat()
    except OSError as error:
        raise SettingsError(
            f"{directory} for LMCache's server at {url} ({error.strerror})",
            expected,
            "Start the server first. In containers both sides need one volume there.",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SettingsError(
            f"{directory} of user {status.st_uid} with mode {stat.filemode(status.st_mode)}",
            expected,
            "Another user could answer there in the server's place. Name another directory.",
        )


def await_server(url: str, seconds: float) -> None:
    """Wait until a server greets who connects, as ZeroMQ's sockets do; else raise SettingsError.

    LMCache's own client would keep files open with each try.
    """
    deadline = time.monotonic() + seconds
    while not _greets(url, max(0.1, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            raise SettingsError(
                f"no answer from an LMCache server at {url}",
                f"one that answers within {seconds:.0f} s",
                "Start it, or leave server_url unset and `lmcache-xpu serve` does.",
            )
        time.sleep(0.1)


def _greets(url: str, timeout_s: float) -> bool:
    at, is_file = urlsplit(url), url.startswith(SCHEME)
    try:
        with socket.socket(socket.AF_UNIX if is_file else socket.AF_INET) as peer:
            peer.settimeout(timeout_s)
            peer.connect(at.path if is_file else (at.hostname, at.port))
            return peer.recv(1) == b"\xff"  # ZMTP 3.1, section 2.1: the signature
    except OSError:
        return False


def listen_at(server: Any, file: str) -> None:
    """Let LMCache's `MessageQueueServer`, before it starts, listen at a file, not at its TCP port.

    A peer that has connected to the port in between is cut off with it.
    """
    server.poller.unregister(server.socket)
    server.socket.close(linger=0)
    server.socket = server.ctx.socket(zmq.ROUTER)
    server.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    server.socket.bind(f"{SCHEME}{file}")
    server.poller.register(server.socket, zmq.POLLIN)


def refuse_inline_tensors(server: Any) -> None:
    """Let a server refuse tensors in a message: older LMCache unpickles them, which runs code.

    Workers of this package write to the server's shared memory, and send none.
    """
    entry = server.handlers.get("commit_store")
    if entry is None:
        return
    commit = entry.handler

    def commit_store(key: Any, instance_id: int, cpu_data: bytes) -> Any:
        return False if cpu_data else commit(key, instance_id, cpu_data)

    entry.handler = commit_store
