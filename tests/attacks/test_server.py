"""Another user, a neighbour in the network, or a broken peer, against LMCache's server."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from support.cache_server import CacheServer
from support.listening import listening
from support.lmcache_server import Client
from support.other_user import NOBODY, as_nobody, needs_root
from support.scripts import environment, run_script

from lmcache_xpu.cache.server import LentMemory
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.cache_server import server_environment
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.server.server_socket import await_server, check_socket, make_directory

SECRETS = {
    "LMCACHE_XPU_API_KEY": "planted-1",
    "LMCACHE_XPU_REMOTE_PASSWORD": "planted-2",
    "HF_TOKEN": "planted-3",
    "AWS_SECRET_ACCESS_KEY": "planted-4",
    "PGPASSWORD": "planted-5",
    "http_proxy": "http://user:planted-6@proxy",
    "LMCACHE_REMOTE_URL_TOKEN": "planted-7",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = CacheServer(tmp_path_factory.mktemp("server") / "server.log", cpu_gib=0.1)
    server.start()
    yield server
    server.kill()


def is_healthy(server: CacheServer) -> bool:
    return httpx.get(f"http://{server.pages}/healthcheck", timeout=20).status_code == 200


@pytest.mark.engine
class TestTheServer:
    def test_it_listens_to_nothing_but_its_socket_and_two_pages_on_loopback(self, server):
        listening = {
            f"{each.laddr.ip}:{each.laddr.port}"
            for each in psutil.Process(server.pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        assert listening == {server.pages}
        assert server.pages.startswith("127.0.0.1:")

    @needs_root
    def test_another_user_reaches_no_socket(self, server):
        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(server.socket))
            return "connected"

        assert as_nobody(connect) == "PermissionError"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            *(("GET", path) for path in ("/env", "/conf", "/status", "/quota", "/threads", "/")),
            *(("POST", path) for path in ("/cache/clear", "/loglevel", "/reconfigure")),
            *(("PUT", "/quota/default"), ("DELETE", "/cache/objects")),
        ],
    )
    def test_no_page_shows_or_changes_more(self, server, method, path):
        answer = httpx.request(method, f"http://{server.pages}{path}", timeout=20)
        assert answer.status_code in (404, 501)
        assert is_healthy(server)

    def test_a_pickle_in_a_message_is_not_read(self, server, tmp_path):
        """By a peer that did reach it; LMCache before 0.5.7 would run what the pickle says."""
        proof = tmp_path / "ran"
        client = Client(server, instance=7)
        key = client._key(1, 1, worker=0)
        stored = client._client.commit_store(key, 7, pickle.dumps(_Runs(str(proof)))).result(20)
        assert not stored
        assert not proof.exists()
        assert client.store(2, 1) == 1  # what workers store without one is taken
        assert client.hit(2, 1) == 1
        client.close()

    def test_a_server_whose_thread_has_ended_says_so(self, server):
        """One message of one empty part ends LMCache's loop."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.connect(server.address)
            peer.send_multipart([b""])
            end = time.monotonic() + 30
            while is_healthy(server):
                assert time.monotonic() < end
                time.sleep(0.2)

    def test_no_secret_of_the_engine_is_in_its_environment(self):
        script = """
import contextlib, io, json, os
from pathlib import Path
from lmcache_xpu.launch.cache_server import start_server
from lmcache_xpu.launch.settings import Settings
values = {"model": "m", "device": "cpu", "cache": "server", "cpu_gib": 0.1}
with contextlib.redirect_stdout(io.StringIO()):
    directory = start_server(Settings.load(values)).removeprefix("ipc://").rpartition("/")[0]
mine = [p for p in Path("/proc").glob("[0-9]*") if directory in (p / "cmdline").read_text()]
planted = [p.name for p in mine if "planted" in (p / "environ").read_text()]
print(json.dumps({"processes": len(mine), "planted": planted}))
"""
        assert run_script(script, **SECRETS) == {"processes": 2, "planted": []}


class _Runs:
    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self):
        return (Path.touch, (Path(self.proof),))


def test_what_the_server_needs_of_the_environment_stays():
    needed = {"PATH": "/bin", "HOME": "/h", "LD_LIBRARY_PATH": "/l", "LMCACHE_LOG_LEVEL": "INFO"}
    kept = server_environment({**needed, **SECRETS, "RANDOM_NAME": "planted"})
    assert needed.items() <= kept.items()
    assert "planted" not in str(kept)


# Pages that answer no question; after the second start they do.
SILENT = """
import http.server, sys
from pathlib import Path
socket, starts = Path(sys.argv[1]), Path(sys.argv[2])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503 if len(starts.read_text()) < 2 else 200)
server = http.server.HTTPServer(("127.0.0.1", 0), Pages)
socket.parent.mkdir(exist_ok=True)
Path(f"{socket}.http").write_text("127.0.0.1:%d" % server.server_port)
server.serve_forever()
"""
KEEPER = """
import sys
from lmcache_xpu.launch import cache_server
cache_server.ASK_S, cache_server.START_S, cache_server.AGAIN_S = 0.1, 0.5, 0
cache_server.keep(sys.argv[1:])
"""


def test_a_server_that_answers_nothing_is_started_anew(tmp_path):
    sock, starts = tmp_path / "s" / "server.sock", tmp_path / "starts"
    command = [sys.executable, "-c", KEEPER, sys.executable, "-c", SILENT, sock, starts]
    keeper = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while not starts.exists() or len(starts.read_text()) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(2)  # it answers now, and is left alone
        assert starts.read_text() == "xx"
    finally:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait(20)


@pytest.fixture
def segment():
    path = Path(f"/dev/shm/lmcache-xpu-test-{os.getpid()}-foreign")
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


def refused(call) -> str:
    with pytest.raises(SettingsError) as error:
        call()
    return str(error.value)


def mapped(path: Path) -> LentMemory:
    import torch

    return LentMemory.of_server(path.name, 4096, torch.device("cpu"))


def test_memory_that_others_may_write_is_not_mapped(segment):
    mapped(segment)
    segment.chmod(0o660)
    assert "expected memory of user" in refused(lambda: mapped(segment))


@needs_root
def test_memory_of_another_user_is_not_mapped(segment):
    os.chown(segment, NOBODY, NOBODY)
    assert f"of user {NOBODY}" in refused(lambda: mapped(segment))


def test_a_link_in_the_place_of_memory_is_not_followed(segment):
    link = segment.with_name(f"{segment.name}-link")
    link.symlink_to(segment)
    try:
        assert "can't be opened here" in refused(lambda: mapped(link))
    finally:
        link.unlink()


def test_a_socket_where_another_user_could_answer_is_refused(tmp_path):
    place = tmp_path / "d" / "server.sock"
    make_directory(place)
    check_socket(f"ipc://{place}")
    place.parent.chmod(0o770)
    assert "(mode 0700)" in refused(lambda: check_socket(f"ipc://{place}"))
    assert "(mode 0700)" in refused(lambda: make_directory(place))
    place.parent.rename(tmp_path / "e")
    assert "Start the server first" in refused(lambda: check_socket(f"ipc://{place}"))
    (tmp_path / "e").chmod(0o700)
    place.parent.symlink_to(tmp_path / "e")
    assert "(mode 0700)" in refused(lambda: check_socket(f"ipc://{place}"))
    assert "at most 107 bytes" in refused(lambda: make_directory(tmp_path / ("x" * 108) / "s"))


@needs_root
def test_a_socket_in_a_directory_of_another_user_is_refused(tmp_path):
    place = tmp_path / "d" / "server.sock"
    make_directory(place)
    os.chown(place.parent, NOBODY, NOBODY)
    assert f"of user {NOBODY}" in refused(lambda: check_socket(f"ipc://{place}"))


def test_a_server_by_tcp_is_taken_only_when_it_is_named():
    values = {"model": "m", "device": "cpu", "cache": "server"}
    assert Settings.load(values).server_url is None  # a socket of its own
    assert Settings.load({**values, "server_url": "tcp://10.0.0.1:5555"})
    with pytest.raises(SettingsError, match="server_url"):
        Settings.load({**values, "server_url": "ipc://relative"})


def test_what_listens_is_found_by_its_greeting(tmp_path):
    """Nobody else on its port is taken for a server, and nobody is waited for without an end."""
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    with listening(directory / "s.sock") as url:
        await_server(url, 1)
    with pytest.raises(SettingsError, match=r"no answer from an LMCache server at ipc://.*s\.sock"):
        await_server(url, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(SettingsError, match="no answer"):
            await_server(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        assert time.monotonic() - begun < 2
