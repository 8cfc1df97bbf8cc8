"""The rendered side-car and engine run as processes, and `helm test`'s script sees a hit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from chart import ROOT, Objects, model
from pod_process import PodProcess

from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

START_S = 200


@pytest.fixture(scope="module")
def place():
    path = Path(tempfile.mkdtemp(prefix="side-car-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def objects(place: Path) -> Objects:
    """A CPU engine with a side-car and a disk tier, of a small model."""
    return model(
        settings={
            "model": str(make_model(EXACT, place)),
            "served_model_name": "small",
            "kv_cache_gib": 0.04,
            "cpu_gib": 0.5,
            "disk_gib": 1,
            "dtype": "float32",
            "enforce_eager": True,
        },
        cache={"kind": "sideCar"},
        disk={"kind": "emptyDir"},
        gpu={"kind": "none"},
    )


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not answers(url):
        ended = process.poll() is not None or time.monotonic() > deadline
        assert not ended, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(objects: Objects, place: Path):
    """The side-car's command, on free ports; the URL of its HTTP interface, and its port."""
    spec = objects.engines()["m"]["spec"]["template"]["spec"]
    [side_car] = spec["initContainers"]
    port, http, log = free_port(), free_port(), place / "server.log"
    environ = {item["name"]: item["value"] for item in side_car["env"]}
    environ |= {"CACHE_PORT": str(port), "CACHE_HTTP_PORT": str(http)}
    environ |= {"CACHE_DISK_PATH": str(place / "kv"), "CACHE_HTTP_HOST": "127.0.0.1"}
    environ |= {"HOME": str(place), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [ROOT / "docker" / side_car["command"][0]],
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{http}"
    try:
        wait(url + side_car["startupProbe"]["httpGet"]["path"], process, log)
        yield {"url": url, "port": port}
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def hits(objects: Objects, server, place: Path) -> tuple[int, int]:
    """Tokens that came back, and all of the prompt, by the script of `helm test`."""
    workload, port = objects.engines()["m"], free_port()
    pod = PodProcess(objects, workload, place, {}, port)
    assert pod.env["LMCACHE_XPU_SERVER_URL"] == "tcp://127.0.0.1:5555"
    pod.env["LMCACHE_XPU_SERVER_URL"] = f"tcp://127.0.0.1:{server['port']}"
    url = f"http://127.0.0.1:{port}"
    with pod.running(confined=False) as process:
        wait(f"{url}/health", process, pod.log)
        [chat] = objects.one("Pod")["spec"]["containers"]
        done = subprocess.run(
            [sys.executable, *chat["command"][1:], chat["args"][0], url, chat["args"][2]],
            capture_output=True,
            text=True,
            timeout=200,
            env={},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"(\d+) of (\d+) tokens came from", done.stdout)
    assert match
    return int(match[1]), int(match[2])


def test_helm_tests_script_sees_a_chat_come_back_from_the_side_car(hits):
    loaded, tokens = hits
    assert tokens - 256 <= loaded < tokens


def test_what_the_engine_stored_is_on_the_servers_disk(hits, place):
    assert list((place / "kv" / "kv-server").iterdir())


def test_the_dashboards_names_are_those_of_the_server(hits, server):
    text = httpx.get(f"{server['url']}/metrics", timeout=10, trust_env=False).text
    sampled = set(re.findall(r"^(\w+)", text, re.MULTILINE))
    board = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    exprs = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    shown = {name for expr in exprs for name in re.findall(r"lmcache_mp_\w+", expr)}
    assert len(shown) >= 5
    # Counted from the first time on that it happens.
    rare = {"lmcache_mp_l1_evicted_chunks_total", "lmcache_mp_l1_allocation_failure_total"}
    assert shown - sampled <= rare


