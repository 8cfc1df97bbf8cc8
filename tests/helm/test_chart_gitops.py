"""`helm template`, Argo CD and Flux make the objects of `helm upgrade`: no cluster is asked."""

from __future__ import annotations

import copy
import re

import pytest
import yaml
from chart import CHART, CI_FILES, KEDA, ROUTER, model, render, shapes
from cluster import KINDS, upgraded

# What only a cluster or an earlier release knows.
ASKS = re.compile(
    r"\blookup\b|\.Capabilities|\.Release\.(IsInstall|IsUpgrade|Revision)"
    r"|\b(now|rand\w+|uuidv4|gen[A-Z]\w+)\b"
)


def test_no_template_asks_the_cluster():
    templates = [path for path in (CHART / "templates").rglob("*") if path.is_file()]
    asking = {
        path.name: match.group()
        for path in templates
        # But for comments, as in {{/* ... */}}.
        if (match := ASKS.search(re.sub(r"/\*.*?\*/|#.*", "", path.read_text(), flags=re.DOTALL)))
    }
    assert asking == {}
    assert len(templates) > 20


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_the_objects_are_those_of_an_upgrade_of_a_cluster_that_changed_meanwhile(path):
    """Pods were scaled, secrets rotated, and the service led elsewhere."""
    planned = shapes()[path.name.removesuffix("-values.yaml")]
    served = {kind for kinds in KINDS.values() for kind in kinds.values()}
    live = [copy.deepcopy(item) for item in planned if item["kind"] in served]
    for item in live:
        if item["kind"] in ("Deployment", "StatefulSet"):
            item["spec"]["replicas"] = 5
            item["status"] = {"readyReplicas": 0}
        if item["kind"] == "Service":
            item["spec"]["selector"]["app.kubernetes.io/component"] = "engine"
    for name in ("api", "hub", "valkey"):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        live.append({**secret, "data": {"key": "b25l"}})
    values = yaml.safe_load(path.read_text())
    assert upgraded(live, **values) == render(**values)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
@pytest.mark.parametrize("settings", [{}, {"disk_gib": 100}])
def test_where_an_autoscaler_decides_the_number_of_pods_is_not_the_manifests(kind, settings):
    """Or each sync would set it back."""
    scaled = model(replicas=3, settings=settings, autoscaling={**KEDA, "kind": kind})
    assert "replicas" not in scaled.engines()["m"]["spec"]
    assert model(replicas=3, settings=settings).engines()["m"]["spec"]["replicas"] == 3


@pytest.mark.parametrize(("front", "component"), [(True, "router"), (False, "engine")])
def test_a_new_router_can_run_before_clients_are_led_to_it(front, component):
    objects = model(router={**ROUTER, "front": front})
    assert objects.one("Deployment", "kv-lmcache-xpu-m-router")["spec"]["replicas"] == 1
    service = objects.one("Service", "kv-lmcache-xpu-m")["spec"]
    assert service["selector"]["app.kubernetes.io/component"] == component
    # Whoever the service leads to lets the clients in.
    policy = objects.one("NetworkPolicy", "kv-lmcache-xpu-m-engine")["spec"]["ingress"][0]["from"]
    assert ({"podSelector": {}} in policy) == (component == "engine")
