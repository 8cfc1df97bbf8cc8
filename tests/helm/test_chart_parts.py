"""What the other pods run: Valkey's command, by a real server."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from chart import SECRET, Objects, container, engine_pod, environment, render, volume
from support.servers import certificate

from lmcache_xpu.harness.engine_process import free_port

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(SERVER is None, reason="no valkey-server or redis-server here")


@contextlib.contextmanager
def running(
    objects: Objects, folder: Path, password: str
) -> Iterator[tuple[int, subprocess.Popen]]:
    """Valkey's command; where it listens and what it reads and writes differs here."""
    valkey = container(objects.one("Deployment", "kv-lmcache-xpu-valkey"), "valkey")
    [script] = valkey["args"]
    port = free_port()
    here, changed = re.subn("--dir /data", f"--dir {folder} --bind 127.0.0.1", script)
    if "--tls-port" in script:
        here = here.replace("--tls-port 6379", f"--tls-port {port}").replace("/tls/", f"{folder}/")
    else:
        here = here.replace("--save", f"--port {port} --save")
    assert changed == 1
    assert str(port) in here
    (folder / "valkey-server").symlink_to(SERVER)
    process = subprocess.Popen(
        [*valkey["command"], here],
        env={"PATH": f"{folder}:/usr/bin:/bin", "PASSWORD": password},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield port, process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answering(client: redis.Redis) -> redis.Redis:
    for _ in range(500):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.01)
    return client


@needs_server
@pytest.mark.parametrize("password", ["plain", 'with space, "quotes", \\back\\slash and $HOME'])
def test_valkeys_command_starts_a_server_with_the_secrets_password(tmp_path: Path, password: str):
    objects = render(valkey={"enabled": True, "gib": 1, "passwordSecret": SECRET})
    with running(objects, tmp_path, password) as (port, process):
        client = answering(redis.Redis(port=port, password=password, decode_responses=True))
        memory = client.config_get("maxmemory*")
        assert memory["maxmemory"] == str(2**30)
        assert memory["maxmemory-policy"] == "allkeys-lru"
        assert client.config_get("save") == {"save": ""}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        # The server has the shell's place: a pod's end reaches it.
        assert client.info("server")["process_id"] == process.pid
        process.terminate()
        assert process.wait(10) == 0


@needs_server
def test_with_a_certificate_valkey_speaks_tls_alone_and_engines_check_it(tmp_path: Path):
    objects = render(valkey={"enabled": True, "passwordSecret": SECRET, "tlsSecret": "cert"})
    [mount] = [
        mount
        for mount in container(objects.engines()["m"])["volumeMounts"]
        if mount["name"] == "valkey-ca"
    ]
    secret = volume(objects, "valkey-ca")["secret"]
    assert secret == {"secretName": "cert", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    valkey = objects.one("Deployment", "kv-lmcache-xpu-valkey")["spec"]["template"]["spec"]
    assert {"name": "tls", "secret": {"secretName": "cert"}} in valkey["volumes"]
    authority, _ = certificate(tmp_path)
    with running(objects, tmp_path, "secret") as (port, _):
        url = environment(objects.engines()["m"])["LMCACHE_XPU_REMOTE_URL"]
        url = url.replace("kv-lmcache-xpu-valkey:6379", f"127.0.0.1:{port}")
        url = url.replace(f"{mount['mountPath']}/ca.crt", str(authority))
        with answering(redis.Redis.from_url(url, password="secret")) as client:
            assert client.set("name", "value")
        with pytest.raises(redis.ConnectionError, match="verify failed"):
            redis.Redis.from_url(url.partition("?")[0], password="secret").ping()
        with pytest.raises(redis.ConnectionError):
            redis.Redis(port=port, password="secret").ping()


def test_without_one_engines_have_no_volume_of_it():
    objects = render(valkey={"enabled": True, "passwordSecret": SECRET})
    assert "valkey-ca" not in {each["name"] for each in engine_pod(objects)["volumes"]}
    assert environment(objects.engines()["m"])["LMCACHE_XPU_REMOTE_URL"].startswith("redis://")
