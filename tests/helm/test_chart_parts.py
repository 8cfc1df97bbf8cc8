"""What the other pods run: Valkey's command, by a real server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis
from chart import container, render

from lmcache_xpu.harness.engine_process import free_port

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


@pytest.mark.skipif(SERVER is None, reason="no valkey-server or redis-server here")
@pytest.mark.parametrize("password", ["plain", 'with space, "quotes", \\back\\slash and $HOME'])
def test_valkeys_command_starts_a_server_with_the_secrets_password(tmp_path: Path, password: str):
    objects = render(
        valkey={"enabled": True, "gib": 1, "passwordSecret": {"name": "s", "key": "k"}}
    )
    valkey = container(objects.one("Deployment", "kv-lmcache-xpu-valkey"), "valkey")
    [script] = valkey["args"]
    port = free_port()
    # Where it listens and writes differs here; the rest is as rendered.
    here = script.replace("--dir /data", f"--dir {tmp_path} --bind 127.0.0.1 --port {port}")
    assert here != script
    (tmp_path / "valkey-server").symlink_to(SERVER)
    process = subprocess.Popen(
        [*valkey["command"], here],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PASSWORD": password},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        client = redis.Redis(port=port, password=password, decode_responses=True)
        for _ in range(500):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.01)
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
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
