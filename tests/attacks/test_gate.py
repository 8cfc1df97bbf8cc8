"""The gate before the router: who gets past it, and with which keys it stands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.launch.settings import Settings

PATH = f"{os.environ['PATH']}:/usr/sbin"
ROUTER = Path(__file__).resolve().parents[2] / "docker/router"
KEYS = ["-abcDEF_123", "-i", "--", "a,b", "s3\"cr\\et '#1 $HOME ${PATH}", "%[path]", "k"]
UNSENDABLE = [" zq", "zq ", "zq\n", "z\tq", "z\nq", "zqé", "zq\x7f"]


class Backend:
    """In the router's place: agrees to any other protocol, and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while head := connection.recv(65536).decode("latin-1"):
                self.seen.append(head)
                if "upgrade" in head.lower() or "switch" in head:
                    answer = "101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c"
                else:
                    answer = "200 OK\r\nContent-Length: 2"
                connection.sendall(f"HTTP/1.1 {answer}\r\n\r\nok".encode())


@pytest.fixture(scope="module")
def backend():
    if not shutil.which("haproxy", path=PATH):
        pytest.skip("haproxy is not installed: the gate before the router was not run")
    backend = Backend()
    yield backend
    backend.close()


def start(folder: Path, key: str, port: int, backend_port: int) -> subprocess.Popen[str]:
    """`docker/router` with a router that only waits."""
    program = folder / "vllm-router"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    gate = {"API_KEY": key, "GATE_ADDRESS": "127.0.0.1", "GATE_PORT": str(port)}
    return subprocess.Popen(
        [ROUTER],
        env={"PATH": f"{folder}:{PATH}", **gate, "ROUTER_PORT": str(backend_port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def gate(folder: Path, key: str, backend: Backend) -> Iterator[int]:
    """A gate that listens; its port."""
    port = free_port()
    process = start(folder, key, port, backend.port)
    try:
        end = time.monotonic() + 20
        while not status(port, "GET /health"):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def status(port: int, request: str, *headers: str) -> int:
    """The status of a request that goes out as it is written; 0 where nobody listens."""
    lines = [f"{request} HTTP/1.1", "Host: gate", *headers]
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    except ConnectionRefusedError:
        return 0
    with connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
        return int(connection.recv(65536).split()[1])


@pytest.fixture(scope="module")
def port(backend, tmp_path_factory):
    with gate(tmp_path_factory.mktemp("gate"), "key", backend) as port:
        yield port


AUTHORIZED = "Authorization: Bearer key"


@pytest.mark.parametrize("path", ["/health", "/liveness", "/readiness", "/v1/models"])
@pytest.mark.parametrize(
    "headers",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
        ("Connection: upgrade", "Upgrade: h2c"),
        ("Upgrade: h2c",),
        ("connection: keep-alive, UPGRADE", "uPGRADE: foo"),
        (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        ),
    ],
)
def test_no_other_protocol_is_agreed_on(port, backend, path, headers):
    """Behind it requests would pass unseen: to /add_worker, and without a key."""
    before = len(backend.seen)
    assert status(port, f"GET {path}", AUTHORIZED, *headers) == 200
    [request] = backend.seen[before:]
    assert not re.search("(?i)upgrade|http2-settings|h2c", request)


def test_a_router_that_changes_the_protocol_unasked_is_not_believed(port):
    assert status(port, "GET /health?switch") == 502


def test_http_2_is_not_spoken(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
@pytest.mark.parametrize("path", ["/health", "/readiness"])
def test_open_paths_are_only_read(port, backend, method, path):
    before = len(backend.seen)
    assert status(port, f"{method} {path}", AUTHORIZED) == 405
    assert len(backend.seen) == before


def test_open_paths_are_read_without_a_key(port):
    assert [status(port, f"{method} /health") for method in ("GET", "HEAD")] == [200, 200]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/%252e%252e/add_worker", "/v1/%2e./add_worker", "/v1/..%2fadd_worker", "/v1/x%00"),
        *("/v1/x%09", "/v1/%61dd", "/v1/./x", "/v1/../x", "/v1/x/.", "/v1/x\\..\\y", "/v1//x"),
        *("/v1/x;y", "/v1/x#y", "/health%20", "/health%3f", "/%68ealth", "/health/", "//health"),
        *("/health/../add_worker", "/add_worker", "/V1/models", "/v1", "*", "http://x/add_worker"),
    ],
)
def test_ways_to_write_another_path_are_refused(port, backend, path):
    before = len(backend.seen)
    assert status(port, f"GET {path}", AUTHORIZED) in (400, 404)
    assert len(backend.seen) == before


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_a_header_can_hold_opens_it_and_no_part_of_it(backend, key, tmp_path):
    with gate(tmp_path, key, backend) as port:
        for scheme in ("Bearer", "bearer"):
            assert status(port, "GET /v1/models", f"Authorization: {scheme} {key}") == 200
        wrong = [key[:-1], f"{key}x", f"{key},x", key.partition(",")[2], key.swapcase() + "_", ""]
        for other in wrong:
            assert status(port, "GET /v1/models", f"Authorization: Bearer {other}") == 401
        for headers in ((), (f"Authorization: {key}",), (f"Authorization: Basic {key}",)):
            assert status(port, "GET /v1/models", *headers) == 401


@pytest.mark.parametrize("key", UNSENDABLE)
def test_other_keys_are_refused_by_the_router_with_a_sentence(key, tmp_path):
    process = start(tmp_path, key, free_port(), free_port())
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "printable ASCII" in said
    assert key not in said


def test_a_configuration_that_haproxy_refuses_is_shown(backend, tmp_path):
    process = start(tmp_path, "k", -1, backend.port)
    said, _ = process.communicate(timeout=20)
    assert process.returncode
    assert "gate.cfg" in said


@pytest.mark.parametrize("key", KEYS)
def test_an_engine_takes_the_same_keys(key):
    assert Settings(model="m", api_key=SecretStr(key)).api_key.get_secret_value() == key


@pytest.mark.parametrize("key", UNSENDABLE)
def test_an_engine_refuses_the_others_and_shows_none(key, monkeypatch):
    monkeypatch.setenv("LMCACHE_XPU_API_KEY", key)
    with pytest.raises(SettingsError, match="printable ASCII") as error:
        Settings.load({"model": "m"})
    assert "not shown" in str(error.value)


@pytest.mark.parametrize("option", ["--api-key", "--api_key", "--api-k", "--hf-token"])
@pytest.mark.parametrize("between", [" ", "="])
def test_no_secret_goes_into_the_arguments_of_an_engine(option, between, monkeypatch):
    monkeypatch.setenv("LMCACHE_XPU_EXTRA_ARGS", f"--seed 1 {option}{between}hunter2")
    with pytest.raises(SettingsError, match=r"in extra_args; expected the variable") as error:
        Settings.load({"model": "m"})
    assert "hunter2" not in str(error.value)
