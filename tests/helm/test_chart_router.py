"""The real vllm-router behind its gate, with the rendered arguments and a stand-in API server."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import yaml
from chart import NAMESPACE, ROOT, container, model, render
from stub_server import Stub

from lmcache_xpu.harness.engine_process import free_port

ROUTED = {"kind": "vllmRouter"}
KEY = 's3"cr\\et #1,2$HOME'


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def pod(name: str, address: str, labels: dict[str, str]) -> dict:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "uid": name},
        "spec": {"containers": []},
        "status": {"phase": "Running", "podIP": address, "conditions": ready},
    }


@pytest.fixture
def router(tmp_path: Path) -> Iterator[dict]:
    with served(tmp_path, "127.0.0.1") as parts:
        yield parts


@contextlib.contextmanager
def served(tmp_path: Path, loopback: str, chat_status: int = 200) -> Iterator[dict]:
    """The rendered router, its API server and its engine, where pods have such addresses."""
    if not shutil.which("haproxy"):
        pytest.skip("haproxy is not installed: the gate before the router was not run")
    objects = render(
        defaults={"router": ROUTED, "apiKeySecret": {"name": "api", "key": "k"}},
        models={"n": {"settings": {"model": "b"}, "gpu": {"kind": "none"}}},
    )
    labels = {
        name: workload["spec"]["template"]["metadata"]["labels"]
        for name, workload in objects.engines().items()
    }
    # The other model's pod has an address where nothing listens.
    pods = [pod("ours", loopback, labels["m"]), pod("other", "127.0.0.2", labels["n"])]
    listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
    api = Stub(lambda path: {} if "watch" in path else {**listed, "items": pods})
    engine = Stub(
        lambda path: {"path": path},
        lambda answer: chat_status if "chat" in answer["path"] else 200,
        host=loopback,
    )
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    deployment = objects.one("Deployment", "kv-lmcache-xpu-m-router")
    spec = container(deployment, "router")
    # The same but for where it listens: the last one counts.
    port, prometheus = free_port(), free_port()
    here = [
        f"--prometheus-host={loopback}",
        f"--prometheus-port={prometheus}",
        f"--service-discovery-port={engine.port}",
    ]
    [program] = spec["command"]
    secrets = {item["name"] for item in spec["env"] if "valueFrom" in item}
    gate = {"GATE_ADDRESS": loopback, "GATE_PORT": str(port), "ROUTER_PORT": str(free_port())}
    gate |= dict.fromkeys(secrets, KEY)
    argv = [ROOT / "docker" / program, *spec["args"], *here]
    with running(argv, tmp_path, gate) as process:
        host = f"[{loopback}]" if ":" in loopback else loopback
        wait_until(lambda: answers(port, host=host) and engine.seen, process)
        yield {
            "port": port,
            "metrics": prometheus,
            "ports": {port, int(gate["ROUTER_PORT"]), prometheus},
            "api": api,
            "engine": engine,
            "objects": objects,
            "process": process,
        }
    for stub in (api, engine):
        stub.shutdown()
        stub.server_close()


@contextlib.contextmanager
def running(argv: list, directory: Path, gate: dict[str, str]) -> Iterator[subprocess.Popen]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(directory), **gate}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**env, "KUBECONFIG": str(directory / "kubeconfig")},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(port: int, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request whose path goes out as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        return connection.getresponse().status


def listening(process: subprocess.Popen) -> set[str]:
    family = psutil.Process(process.pid)
    sockets = [s for child in family.children(recursive=True) for s in child.net_connections()]
    return {f"{s.laddr.ip}:{s.laddr.port}" for s in sockets if s.status == psutil.CONN_LISTEN}


def answers(port: int, path: str = "/readiness", host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://{host}:{port}{path}", trust_env=False).status_code == 200
    return False


def wait_until(true, process: subprocess.Popen, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_finds_the_engines_of_its_model_and_passes_keys_on(router):
    answer = httpx.post(
        f"http://127.0.0.1:{router['port']}/v1/chat/completions",
        json={"model": "org/model", "messages": [{"role": "user", "content": "hi"}]},
        headers={"Authorization": f"Bearer {KEY}"},
        trust_env=False,
    )
    assert answer.json() == {"path": "/v1/chat/completions"}
    chats = [h for method, path, h in router["engine"].seen if path == "/v1/chat/completions"]
    assert [headers["authorization"] for headers in chats] == [f"Bearer {KEY}"]
    for path in ("/readiness", "/liveness"):  # the pod's probes
        assert answers(router["port"], path)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_it_leads_to_engines_where_there_is_ipv6_alone(tmp_path):
    with served(tmp_path, "::1") as router:
        answer = httpx.get(
            f"http://[::1]:{router['port']}/v1/models",
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
        )
        assert answer.status_code == 200
        listens = {address for address in listening(router["process"]) if "127." not in address}
        assert f"::1:{router['port']}" in listens


def test_errors_that_clients_get_are_counted_where_the_alert_looks(tmp_path):
    with served(tmp_path, "127.0.0.1", chat_status=500) as router:
        answer = httpx.post(
            f"http://127.0.0.1:{router['port']}/v1/chat/completions",
            json={"model": "org/model", "messages": [{"role": "user", "content": "hi"}]},
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=30,
        )
        assert answer.status_code == 500
        url = f"http://127.0.0.1:{router['metrics']}/metrics"
        samples = httpx.get(url, trust_env=False).text.splitlines()
    rules = yaml.safe_load((ROOT / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    [looks] = [rule["expr"] for rule in rules if rule["alert"] == "RequestsFail"]
    [metric] = re.findall(r"vllm_router_\w+", looks)
    assert f'{metric}{{route="/v1/chat/completions"}} 1' in samples


ATTACKS = (
    ("POST", "/add_worker?url=http://127.0.0.1:9"),
    ("POST", "/remove_worker?url=http://127.0.0.1:9"),
    ("GET", "/list_workers"),
    ("GET", "/workers"),
    ("GET", "/metrics"),
    ("GET", "/get_server_info"),
    ("POST", "/flush_cache"),
    ("POST", "/v1/../add_worker?url=http://127.0.0.1:9"),
    ("POST", "/v1/%2e%2e/add_worker?url=http://127.0.0.1:9"),
    ("POST", "//add_worker?url=http://127.0.0.1:9"),
)


def test_nobody_takes_over_the_router(router):
    """With a server of theirs as a worker, they would get all prompts and the clients' keys."""
    for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer guessed"}):
        statuses = [ask(router["port"], method, path, headers) for method, path in ATTACKS]
        assert statuses == [404] * len(ATTACKS)
    # Through the gate alone: the router itself listens on loopback.
    assert listening(router["process"]) == {f"127.0.0.1:{port}" for port in router["ports"]}


def test_keys_are_checked_before_the_router(router):
    before = len(router["engine"].seen)
    for headers in ({}, {"Authorization": "Bearer guessed"}, {"Authorization": KEY}):
        assert ask(router["port"], "GET", "/v1/models", headers) == 401
    assert len(router["engine"].seen) == before
    assert ask(router["port"], "GET", "/v1/models", {"Authorization": f"Bearer {KEY}"}) == 200


def test_it_ends_as_a_whole_when_the_router_does(router):
    for child in psutil.Process(router["process"].pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # of the script, which starts short ones
            if child.name() != "haproxy":
                child.kill()
    assert router["process"].wait(timeout=20) != 0


def test_it_asks_the_api_for_no_more_than_its_role_allows(router):
    asked = {
        (urlsplit(path).path, "watch" if "watch=true" in path else "list")
        for _, path, _ in router["api"].seen
    }
    assert {path for path, _ in asked} == {f"/api/v1/namespaces/{NAMESPACE}/pods"}
    [rule] = router["objects"].one("Role")["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["pods"])
    assert {verb for _, verb in asked} <= set(rule["verbs"])
    binding = router["objects"].one("RoleBinding")
    account = router["objects"].one("ServiceAccount", binding["subjects"][0]["name"])
    for where, spec in router["objects"].pods():
        if where.endswith("-router"):
            assert spec["serviceAccountName"] == account["metadata"]["name"]


def test_it_ends_when_its_pod_is_stopped(router):
    router["process"].send_signal(signal.SIGTERM)
    assert router["process"].wait(timeout=20) == 0


def test_every_policy_is_one_that_it_knows():
    from chart_schema import Router
    from vllm_router.launch_router import parse_router_args

    policies = Router.model_json_schema()["properties"]["policy"]["enum"]
    for policy in policies:
        routed = {**ROUTED, "policy": policy, "extraArgs": ["--cache-threshold", "0.5"]}
        args = container(
            model(router=routed).one("Deployment", "kv-lmcache-xpu-m-router"), "router"
        )["args"]
        parsed = parse_router_args(args)
        assert parsed.policy == policy
        assert parsed.service_discovery_namespace == NAMESPACE
        assert parsed.selector["lmcache-xpu/model"] == "m"
        assert parsed.cache_threshold == 0.5
        assert parsed.prometheus_host == "0.0.0.0"
