"""The real vllm-router with the rendered arguments, against an API server that knows our pods."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from chart import NAMESPACE, container, model, render
from stub_server import Stub

from lmcache_xpu.harness.engine_process import free_port

ROUTED = {"kind": "vllmRouter"}


def pod(name: str, address: str, labels: dict[str, str]) -> dict:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "uid": name},
        "spec": {"containers": []},
        "status": {"phase": "Running", "podIP": address, "conditions": ready},
    }


@pytest.fixture
def router(tmp_path: Path):
    """The rendered router, its API server and its engine."""
    objects = render(
        defaults={"router": ROUTED},
        models={"n": {"settings": {"model": "b"}, "gpu": {"kind": "none"}}},
    )
    labels = {
        name: workload["spec"]["template"]["metadata"]["labels"]
        for name, workload in objects.engines().items()
    }
    # The other model's pod has an address where nothing listens.
    pods = [pod("ours", "127.0.0.1", labels["m"]), pod("other", "127.0.0.2", labels["n"])]
    listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
    api = Stub(lambda path: {} if "watch" in path else {**listed, "items": pods})
    engine = Stub(lambda path: {"path": path})
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
    found = container(deployment, "router")
    # The same but for where it listens: the last one counts.
    port = free_port()
    here = [
        "--host=127.0.0.1",
        f"--port={port}",
        "--prometheus-host=127.0.0.1",
        f"--prometheus-port={free_port()}",
        f"--service-discovery-port={engine.port}",
    ]
    program = Path(sys.executable).with_name(found["command"][0])
    with running([program, *found["args"], *here], tmp_path) as process:
        wait_until(lambda: answers(port) and engine.seen, process)
        yield {"port": port, "api": api, "engine": engine, "objects": objects, "process": process}
    for stub in (api, engine):
        stub.shutdown()
        stub.server_close()


@contextlib.contextmanager
def running(argv: list, directory: Path) -> Iterator[subprocess.Popen]:
    env = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**env, "KUBECONFIG": str(directory / "kubeconfig")},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answers(port: int, path: str = "/readiness") -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200
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
        headers={"Authorization": "Bearer client"},
        trust_env=False,
    )
    assert answer.json() == {"path": "/v1/chat/completions"}
    chats = [h for method, path, h in router["engine"].seen if path == "/v1/chat/completions"]
    assert [headers["authorization"] for headers in chats] == ["Bearer client"]
    for path in ("/readiness", "/liveness"):  # the pod's probes
        assert answers(router["port"], path)


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
        assert (parsed.host, parsed.port, parsed.policy) == ("0.0.0.0", 8000, policy)
        assert parsed.service_discovery_namespace == NAMESPACE
        assert parsed.selector["lmcache-xpu/model"] == "m"
        assert parsed.cache_threshold == 0.5
        assert parsed.prometheus_host == "0.0.0.0"
