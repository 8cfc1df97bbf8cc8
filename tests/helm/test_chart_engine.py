"""The rendered CPU pod's command starts an engine, and `helm test`'s script passes and fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from chart import CHART, CI_FILES, NAMESPACE, Objects, rendered, template
from pod_process import PodProcess

from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

KEY = "a key"
START_S = 200


@pytest.fixture(scope="module")
def place():
    """A directory that other users can enter, which pytest's can't."""
    path = Path(tempfile.mkdtemp(prefix="chart-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def objects(place: Path) -> Objects:
    """The CPU shape, with a small model and tiers to fit."""
    [cpu] = [path for path in CI_FILES if path.name == "cpu-values.yaml"]
    model = make_model(EXACT, place)
    values = {
        "models": {
            "small": {
                "settings": {
                    "model": str(model),
                    "served_model_name": "small",
                    "kv_cache_gib": 0.04,
                    "cpu_gib": 1,
                    "disk_gib": 1,
                    "drain_s": 5,
                    "dtype": "float32",
                    "enforce_eager": True,
                    "log_level": "info",
                },
                "disk": {"kind": "emptyDir"},
                "apiKeySecret": {"name": "api", "key": "key"},
                "autoscaling": {"kind": "keda", "prometheusUrl": "http://p:9090"},
                "stop": {"marginS": 30},
            }
        }
    }
    return rendered(template("-f", str(cpu), values=values))


@pytest.fixture(scope="module")
def engine(objects: Objects, place: Path):
    """The URL of the pod's process."""
    workload = objects.engines()["small"]
    port = free_port()
    pod = PodProcess(objects, workload, place, {"(secret api/key)": KEY}, port)
    confined = pod.confinable()
    url = f"http://127.0.0.1:{port}"
    with pod.running(confined=confined) as process:
        deadline = time.monotonic() + START_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                log = pod.log.read_text(errors="replace")
                pytest.fail("\n".join([*re.findall(r".*Error: .*", log), log[-2000:]]))
            time.sleep(0.2)
        yield {"url": url, "pod": pod, "pid": process.pid, "confined": confined}
    assert process.returncode in (0, -15), pod.log.read_text(errors="replace")[-3000:]


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_the_engine_runs_with_nothing_but_its_volumes_to_write_on(engine):
    """Read-only root, a user without rights: what the pod's security context asks for."""
    if not engine["confined"]:
        pytest.skip("no root, or no mount namespaces: the pod's process ran unconfined")
    status = Path(f"/proc/{engine['pid']}/status").read_text()
    assert re.search(rf"^Uid:\t{engine['pod'].user}\t", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    mounts = Path(f"/proc/{engine['pid']}/mountinfo").read_text()
    assert re.search(r" / / ro,", mounts)


def test_probes_and_metrics_need_no_key_and_the_api_does(engine, objects):
    [container] = objects.engines()["small"]["spec"]["template"]["spec"]["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert httpx.get(engine["url"] + container[kind]["httpGet"]["path"]).status_code == 200
    assert httpx.get(f"{engine['url']}/metrics").status_code == 200
    for path in ("/v1/models", "/version", "/load"):
        assert httpx.get(engine["url"] + path).status_code == 401
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/invocations", "/tokenize"):  # vLLM guards the first
        assert httpx.post(engine["url"] + path, json=chat).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        done = httpx.post(engine["url"] + path, json=chat, headers=headers, timeout=60)
        assert done.status_code == 200, path


def script(objects: Objects, url: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """What `helm test`'s pod runs, on this machine's engine."""
    pod = objects.one("Pod")
    [chat] = pod["spec"]["containers"]
    assert chat["command"] == ["python3", "-I", "-c"]
    text, where, model = chat["args"]
    assert where == "http://kv-lmcache-xpu-small-engine:8000"
    assert text == (CHART / "files" / "chat_twice.py").read_text()
    [api_key] = chat["env"]
    assert api_key["valueFrom"]["secretKeyRef"] == {"name": "api", "key": "key"}
    return subprocess.run(
        [sys.executable, *chat["command"][1:], text, url, model],
        env={api_key["name"]: key},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_helm_tests_script_sees_a_chat_come_back(engine, objects):
    done = script(objects, engine["url"])
    assert done.returncode == 0, done.stdout + done.stderr
    hits, tokens = map(int, re.search(r"(\d+) of (\d+) tokens came from", done.stdout).groups())
    # All whole chunks, and nothing of the engine's own cache.
    assert tokens - 256 <= hits < tokens


def test_helm_tests_script_fails_with_the_reason(engine, objects):
    done = script(objects, engine["url"], key="another")
    assert done.returncode == 1
    assert "status 401" in done.stderr


def test_kedas_queries_ask_for_what_this_engine_exports(engine, objects):
    """Metric and labels; `namespace` is what Prometheus adds to whatever it scrapes."""
    text = httpx.get(f"{engine['url']}/metrics").text
    triggers = objects.one("ScaledObject")["spec"]["triggers"]
    assert len(triggers) == 2
    for trigger in triggers:
        query = trigger["metadata"]["query"]
        [(metric, labels)] = re.findall(r"(vllm:\w+)\{(.*?)\}", query)
        wanted = dict(re.findall(r'(\w+)="(.*?)"', labels))
        assert wanted.pop("namespace") == NAMESPACE
        samples = [line for line in text.splitlines() if line.startswith(metric + "{")]
        assert samples, metric
        for name, value in wanted.items():
            assert f'{name}="{value}"' in samples[0]
        for label in re.findall(r"by \((\w+)\)", query):
            assert f"{label}=" in samples[0]
