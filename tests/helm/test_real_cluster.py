"""The chart on a real API server, in a namespace of its own where no pod may start.

To run it, set KUBECONFIG to the file of a cluster where you may make namespaces, and have kubectl.
A quota of no pods keeps the cluster from running anything; the namespace is deleted at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from chart import CHART, CI_FILES, FROZEN, HELM, MODEL, earlier_values, merged

DISK = {"models": {"m": {"settings": {"disk_gib": 100}}}}
SCALED = {"kind": "hpa", "minReplicas": 2, "maxReplicas": 6}

if not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None:
    pytest.skip(
        "KUBECONFIG names no cluster to try the chart on, or kubectl is missing",
        allow_module_level=True,
    )


def call(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=240)


class Namespace:
    """A namespace of the cluster, and the releases in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *args: str, text: str = "") -> str:
        done = call("kubectl", "-n", self.name, *args, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def helm(self, command: str, *args: str, **values: object):
        files = ["-f", "-"] if values else []
        return call(str(HELM), command, "-n", self.name, *args, *files, text=json.dumps(values))

    def install(self, release: str, *args: str, **values: object) -> None:
        done = self.helm("upgrade", "--install", release, str(CHART), *args, **values)
        assert done.returncode == 0, done.stderr

    def specs(self, names: Iterable[str] | None = None) -> dict[str, dict]:
        """The specs of what engines are made from: of all objects, or of these."""
        kinds = "deployment,statefulset,configmap,service,persistentvolumeclaim"
        items = json.loads(self.kubectl("get", kinds, "-o", "json"))["items"]
        specs = {
            f"{item['kind']}/{item['metadata']['name']}": item.get("spec", item.get("data"))
            for item in items
        }
        for spec in specs.values():
            spec.pop("volumeName", None)  # a claim is bound whenever its volume is there
        return {name: specs[name] for name in (specs if names is None else names)}

    def served(self, kinds: set[tuple[str, str]]) -> set[tuple[str, str]]:
        lines = self.kubectl("api-resources", "--no-headers").splitlines()
        return kinds & {(line.split()[-3], line.split()[-1]) for line in lines}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Namespace]:
    namespace = Namespace(f"lmcache-xpu-test-{uuid.uuid4().hex[:8]}")
    namespace.kubectl("create", "namespace", namespace.name)
    try:
        namespace.kubectl("create", "quota", "nothing-runs", "--hard=pods=0")
        yield namespace
    finally:
        namespace.kubectl("delete", "namespace", namespace.name, "--wait=false")


@pytest.fixture
def release(cluster: Namespace) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:6]}"
    yield name
    cluster.helm("uninstall", name, "--ignore-not-found")
    cluster.kubectl("delete", "pvc", "-l", f"app.kubernetes.io/instance={name}", "--wait=false")


def render_or_skip(cluster: Namespace, release: str, path: Path) -> str:
    """The objects of a file of ci/; skips where the cluster doesn't know a kind of them."""
    done = cluster.helm("template", release, str(CHART), "-f", str(path), "--no-hooks")
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = {(item["apiVersion"], item["kind"]) for item in objects}
    if missing := kinds - cluster.served(kinds):
        pytest.skip(f"the cluster has no {', '.join(sorted(kind for _, kind in missing))}")
    return done.stdout


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_the_server_takes_every_object(cluster, release, path):
    text = render_or_skip(cluster, release, path)
    cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    cluster.install(release, "-f", str(path))


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_a_release_becomes_another_shape_and_comes_back(cluster, release, path):
    render_or_skip(cluster, release, path)
    cluster.install(release, **MODEL)
    before = cluster.specs()
    cluster.install(release, "-f", str(path))
    done = cluster.helm("rollback", release, "1")
    assert done.returncode == 0, done.stderr
    assert before.keys() <= cluster.specs().keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": {"disk_gib": 200}}, "updates to statefulset spec"),
        ({"settings": {"tensor_parallel": 2}}, "updates to statefulset spec"),
        ({"disk": {"storageClassName": "another"}}, "updates to statefulset spec"),
        ({"httpRoute": {"enabled": True}}, "expected the gateways"),
    ],
)
def test_a_refused_upgrade_changes_nothing_that_runs(cluster, release, change, says):
    values = merged(merged(MODEL, DISK), {"models": {"m": {"disk": {"storageClassName": "a"}}}})
    cluster.install(release, **values)
    before = cluster.specs()
    changed = merged(values, {"models": {"m": change}})
    done = cluster.helm("upgrade", release, str(CHART), **changed)
    assert done.returncode != 0
    assert says in done.stderr
    assert cluster.specs(before) == before
    # The values that ran are taken again, and heal nothing because nothing was broken.
    cluster.install(release, **values)
    assert cluster.specs(before) == before


@pytest.mark.parametrize("shape", [{}, DISK])
def test_an_upgrade_keeps_the_pods_that_autoscaling_made(cluster, release, shape):
    values = merged(merged(MODEL, shape), {"models": {"m": {"autoscaling": SCALED}}})
    cluster.install(release, **values)
    kind = "StatefulSet" if shape else "Deployment"
    cluster.kubectl("scale", f"{kind}/{release}-lmcache-xpu-m", "--replicas=3")
    cluster.install(release, **merged(values, {"models": {"m": {"settings": {"drain_s": 61}}}}))
    [spec] = [
        spec for name, spec in cluster.specs().items() if name.startswith(f"{kind}/{release}")
    ]
    assert spec["replicas"] == 3


@pytest.mark.parametrize("shape", [{}, DISK])
def test_waiting_for_an_engine_that_never_comes_fails(cluster, release, shape):
    """No pod may start here. Helm counts a Deployment as ready that may lack all of its pods."""
    wait = ("--install", release, str(CHART), "--wait", "--timeout", "8s")
    done = cluster.helm("upgrade", *wait, **merged(MODEL, shape))
    assert done.returncode != 0
    assert "context deadline exceeded" in done.stderr


@pytest.mark.parametrize("shape", [{}, DISK])
@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_values_of_an_earlier_chart_are_upgraded(cluster, release, path, shape):
    values = merged(MODEL, shape)
    cluster.install(release, **merged(earlier_values(path), values))
    cluster.install(release, "--reset-values", **values)
