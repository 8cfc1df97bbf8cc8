"""What the other pods run: Valkey's command by a real server, Locust's options by the load test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from chart import ROOT, container, render, shapes

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


def test_the_load_test_takes_the_jobs_options():
    """In a process of its own: Locust replaces parts of Python's library."""
    [job] = shapes()["loadtest"].of("Job")
    [locust] = job["spec"]["template"]["spec"]["containers"]
    script = """
import json, sys
import loadtests.hooks
from locust.argument_parser import parse_options
from locust.env import Environment
from loadtests.options import Options
from loadtests.workloads import WORKLOADS
options = parse_options(sys.argv[1:])
values = Options.of(Environment(parsed_options=options)).model_dump(mode="json")
values |= {name: getattr(options, name) for name in ("host", "num_users", "tags", "headless")}
print(json.dumps({**values, "workloads": list(WORKLOADS)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *locust["args"]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={locust["env"][-1]["name"]: "the key"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    printed_options = json.loads(done.stdout.splitlines()[-1])
    from chart_schema import Loadtest

    assert (
        Loadtest.model_json_schema()["properties"]["workload"]["enum"]
        == printed_options["workloads"]
    )
    assert printed_options["headless"] is True
    assert printed_options["host"] == "http://kv-lmcache-xpu-small:80"
    assert (printed_options["num_users"], printed_options["tags"]) == (4, ["multi-round"])
    assert (printed_options["duration_s"], printed_options["num_rounds"]) == (60, 3)
    assert printed_options["model"] == "Qwen/Qwen3-0.6B"
    assert printed_options["report_dir"] == "/reports/kv-1"
    assert printed_options["api_key"] == "the key"
