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

from lmcache_xpu.harness.client import Answer, Client
from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = [pytest.mark.engine, pytest.mark.matrix]  # containers/ has the server in a stack

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
            "max_model_len": 8192,
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
        if ended:
            text = log.read_text(errors="replace")
            pytest.fail("\n".join([*re.findall(r".*Error: .*", text), text[-2000:]]))
        time.sleep(0.2)


class SideCar:
    """The side-car's command as a process, on free ports."""

    def __init__(self, objects: Objects, place: Path) -> None:
        spec = objects.engines()["m"]["spec"]["template"]["spec"]
        [self.spec] = spec["initContainers"]
        self.pages, self.log = f"127.0.0.1:{free_port()}", place / "server.log"
        self.socket = Path(tempfile.mkdtemp(prefix="lmcache-xpu-")) / "server.sock"
        environ = {item["name"]: item["value"] for item in self.spec["env"]}
        environ |= {"CACHE_SOCKET": str(self.socket), "CACHE_PAGES": self.pages}
        environ |= {"CACHE_DISK_PATH": str(place / "kv")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {**environ, "HOME": str(place), "PATH": path}
        self.url = f"http://{self.pages}"

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [ROOT / "docker" / self.spec["command"][0]],
                env=self.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait(self.url + self.spec["startupProbe"]["httpGet"]["path"], self.process, self.log)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text


@pytest.fixture(scope="module")
def server(objects: Objects, place: Path):
    side_car = SideCar(objects, place)
    try:
        side_car.start()
        yield side_car
    finally:
        side_car.stop()


@pytest.fixture(scope="module")
def engine(objects: Objects, server: SideCar, place: Path):
    """The URL of the pod's engine."""
    port = free_port()
    pod = PodProcess(objects, objects.engines()["m"], place, {}, port)
    assert pod.env["LMCACHE_XPU_SERVER_URL"] == "ipc:///dev/shm/lmcache-xpu/server.sock"
    pod.env["LMCACHE_XPU_SERVER_URL"] = f"ipc://{server.socket}"
    url = f"http://127.0.0.1:{port}"
    with pod.running(confined=False) as process:
        wait(f"{url}/health", process, pod.log)
        yield url


@pytest.fixture(scope="module")
def script(objects: Objects, engine: str) -> subprocess.CompletedProcess[str]:
    """What `helm test`'s pod runs."""
    [chat] = objects.one("Pod")["spec"]["containers"]
    text, _, name = chat["args"]
    return subprocess.run(
        [sys.executable, *chat["command"][1:], text, engine, name],
        capture_output=True,
        text=True,
        timeout=200,
        env={},
    )


def test_helm_tests_script_sees_a_chat_come_back_from_the_side_car(script):
    assert script.returncode == 0, script.stdout + script.stderr
    hits, tokens = map(int, re.search(r"(\d+) of (\d+) tokens came from", script.stdout).groups())
    assert tokens - 256 <= hits < tokens


def test_the_dashboards_names_are_those_of_the_server(script, server):
    sampled = set(re.findall(r"^(\w+)", server.metrics, re.MULTILINE))
    board = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    exprs = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    shown = {name for expr in exprs for name in re.findall(r"lmcache_mp_\w+", expr)}
    assert len(shown) >= 5
    # Counted from the first time on that it happens.
    rare = {"lmcache_mp_l1_evicted_chunks_total", "lmcache_mp_l1_allocation_failure_chunks_total"}
    assert shown - sampled <= rare, sorted(name for name in sampled if "lmcache_mp" in name)


def test_hits_come_from_its_disk_after_the_side_car_is_another(engine, server, script):
    """As after a crash of its container: its memory is empty, the engine goes on."""
    with Client(engine, timeout_s=120) as client:
        expected = ask(client, conversation(1))
        crowd_out(client, 100)
        stored = len(files(server))
        server.stop()
        server.start()
        deadline = time.monotonic() + 60
        while True:
            before = client.counts()
            answer = ask(client, conversation(1))
            hits = (client.counts() - before).external_hits
            if hits >= 1024 or time.monotonic() > deadline:
                break
            crowd_out(client, 200)
    assert hits >= 1024
    assert answer.token_ids == expected.token_ids
    assert stored
    loaded = re.search(
        r'^lmcache_xpu_bytes_total\{direction="load",tier="disk"\} (\S+)',
        server.metrics,
        re.MULTILINE,
    )
    assert float(loaded[1]) > 0


def files(server: SideCar) -> list[Path]:
    return list((Path(server.environ["CACHE_DISK_PATH"]) / "kv-server").glob("*.lmxkv"))


def conversation(seed: int) -> list[dict[str, str]]:
    """A prompt of its own for each seed, of some 1,500 tokens and more."""
    words = " ".join(str((seed * 7919 + i * 104729) % 99991) for i in range(250))
    return [{"role": "user", "content": words}]


def ask(client: Client, messages: list[dict[str, str]], tokens: int = 24) -> Answer:
    return client.chat(messages, max_tokens=tokens)


def crowd_out(client: Client, first_seed: int) -> None:
    """Fill the engine's own cache with other prompts."""
    for seed in range(first_seed, first_seed + 12):
        ask(client, conversation(seed), tokens=2)
