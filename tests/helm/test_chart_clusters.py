"""Clusters that differ: they give pods their users, have IPv6 alone, or one volume for one node."""

from __future__ import annotations

import pytest
import yaml
from chart import (
    CI_FILES,
    KEDA,
    MODEL,
    ROUTER,
    VALKEY,
    Objects,
    container,
    engine_pod,
    environment,
    merged,
    model,
    render,
    template,
)

# OpenShift's SCC restricted-v2, which is every user's.
SCC_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def refusal(**values: object) -> str:
    done = template(values=merged(MODEL, values))
    assert done.returncode
    return done.stderr


def assert_restricted(objects: Objects) -> None:
    assert objects.pods()
    for where, pod in objects.pods():
        security = pod["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & security.keys(), where
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod.get("volumes", []):
            assert volume.keys() - {"name"} <= SCC_VOLUMES, where
        for each in [*pod.get("initContainers", []), *pod["containers"]]:
            own = each["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in own


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_openshifts_restricted_scc_takes_every_pod(path):
    values = yaml.safe_load(path.read_text())
    if path.name == "host-path-values.yaml":
        assert "disk.kind is hostPath with clusterUsers" in refusal(**values, clusterUsers=True)
        values = merged(values, {"models": {"llama": {"disk": {"kind": "emptyDir"}}}})
    assert_restricted(render(**values, clusterUsers=True))


def test_without_that_pods_have_users_of_the_chart():
    objects = render(valkey=VALKEY, defaults={"router": ROUTER, "user": 1234})
    users = {pod["securityContext"]["runAsUser"] for _, pod in objects.pods()}
    assert users == {1234, 999}


def test_on_ipv6_everything_listens_there():
    objects = render(ipv6=True, defaults={"router": ROUTER})
    assert environment(objects.engines()["m"])["LMCACHE_XPU_HOST"] == "::"
    router = container(objects.one("Deployment", "kv-lmcache-xpu-m-router"), "router")
    assert {"name": "GATE_ADDRESS", "value": "::"} in router["env"]
    assert "--prometheus-host=::" in router["args"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"cache": {"kind": "sideCar"}}, "cache.kind is sideCar with ipv6; expected inProcess"),
        ({"settings": {"kv_events": "tcp://*:5557"}}, "kv_events is set with ipv6; expected it"),
    ],
)
def test_what_can_not_listen_on_ipv6_is_refused(keys, says):
    assert says in refusal(ipv6=True, models={"m": keys})


SHARED = {"cache": "volumeClaim"}


@pytest.mark.parametrize(
    "keys",
    [
        {"replicas": 2},
        {"autoscaling": {**KEDA, "maxReplicas": 2}},
        {"replicas": 2, "files": {"accessMode": "ReadWriteOncePod"}},
        {
            "replicas": 2,
            "files": {"accessMode": "ReadWriteOncePod"},
            "nodeSelector": {"kubernetes.io/hostname": "n"},
        },
    ],
)
def test_several_pods_and_a_claim_for_one_node_are_refused(keys):
    said = refusal(models={"m": merged({"files": SHARED}, keys)})
    assert "models.m has up to 2 pods and files.cache is volumeClaim" in said
    assert "expected ReadWriteMany" in said


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"autoscaling": {**KEDA, "maxReplicas": 1}},
        {"replicas": 2, "files": {"accessMode": "ReadWriteMany"}},
        {"replicas": 2, "nodeSelector": {"kubernetes.io/hostname": "n"}},
        {"replicas": 2, "files": {"cache": "emptyDir"}},
    ],
)
def test_a_claim_that_its_pods_can_share_is_taken(keys):
    assert engine_pod(model(**merged({"files": SHARED}, keys)))
