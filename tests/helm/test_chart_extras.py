"""What Kubernetes can say of these pods and services, the values can say, too."""

from __future__ import annotations

import kubernetes_validate
import pytest
from chart import (
    MODEL,
    POOL,
    ROUTER,
    Objects,
    container,
    engine_pod,
    merged,
    model,
    render,
    template,
)

OBJECT = "kv-lmcache-xpu-m"


def ingress(objects: Objects) -> list[dict]:
    """The rules by which engines are reached."""
    return objects.one("NetworkPolicy", f"{OBJECT}-engine")["spec"]["ingress"]


def valid(objects: Objects) -> Objects:
    for item in objects:
        if item["apiVersion"] != "inference.networking.k8s.io/v1":
            kubernetes_validate.validate(item, "1.37", strict=True)
    return objects


def test_the_engines_container_can_have_capabilities_and_no_other_has_them():
    more = {"capabilities": {"add": ["SYS_PTRACE"]}, "privileged": True}
    pod = engine_pod(valid(model(containerSecurityContext=more, files={"download": True})))
    security = pod["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert (security["privileged"], security["readOnlyRootFilesystem"]) == (True, True)
    assert pod["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("settings", "field", "strategy"),
    [
        ({}, "strategy", {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}),
        ({"disk_gib": 1}, "updateStrategy", {"type": "OnDelete"}),
    ],
)
def test_the_update_strategy_can_be_another(settings, field, strategy):
    objects = valid(model(settings=settings, strategy=strategy))
    assert objects.engines()["m"]["spec"][field] == strategy


def test_probes_can_differ_in_part_or_ask_in_another_way():
    plain = container(model().engines()["m"])
    own = {
        "liveness": {"timeoutSeconds": 30},
        "readiness": {"tcpSocket": {"port": "http"}},
        "startup": {"initialDelaySeconds": 60},
    }
    engine = container(valid(model(probes=own)).engines()["m"])
    assert engine["livenessProbe"] == {**plain["livenessProbe"], "timeoutSeconds": 30}
    assert engine["startupProbe"] == {**plain["startupProbe"], "initialDelaySeconds": 60}
    assert engine["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert "httpGet" not in engine["readinessProbe"]


def test_variables_can_come_from_secrets_as_a_whole():
    source = [{"secretRef": {"name": "proxy"}}]
    pod = engine_pod(valid(model(extraEnvFrom=source, files={"download": True})))
    assert pod["containers"][0]["envFrom"] == pod["initContainers"][0]["envFrom"] == source
    assert "envFrom" not in engine_pod(model())["containers"][0]


def test_every_pod_can_have_another_scheduler():
    objects = valid(
        render(
            defaults={"schedulerName": "volcano", "router": ROUTER},
            otherPods={"schedulerName": "other"},
        )
    )
    schedulers = {where: pod["schedulerName"] for where, pod in objects.pods()}
    assert schedulers.pop(f"Deployment/{OBJECT}") == "volcano"
    assert schedulers == {f"Deployment/{OBJECT}-router": "other", f"Pod/{OBJECT}-chat": "other"}


def test_the_service_can_have_source_ranges_and_ip_families():
    spec = {
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "ipFamilyPolicy": "PreferDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
    }
    service = valid(model(service={"type": "LoadBalancer", "spec": spec})).one("Service", OBJECT)
    assert spec.items() <= service["spec"].items()
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"][0]["port"] == 80
    for own in ({"ports": []}, {"selector": {}}, {"type": "NodePort"}):
        done = template(values=merged(MODEL, {"defaults": {"service": {"spec": own}}}))
        assert f'Property name of "{next(iter(own))}"' in done.stderr


def test_the_router_can_have_variables():
    more = {"name": "RUST_LOG", "value": "debug"}
    objects = valid(model(router={**ROUTER, "extraEnv": [more]}))
    assert more in container(objects.one("Deployment", f"{OBJECT}-router"), "router")["env"]


def test_more_ports_of_the_engines_can_be_opened():
    rule = {"ports": [{"port": 9000}], "from": [{"podSelector": {"matchLabels": {"app": "x"}}}]}
    opened = valid(render(networkPolicy={"extraIngress": [rule]}))
    assert ingress(opened) == [*ingress(render()), rule]


@pytest.mark.parametrize("engines", [1, 2])
def test_kv_events_reach_the_endpoint_picker(engines):
    """Each engine of data parallel publishes at a port of its own, one after the other."""
    picker = {**POOL["endpointPicker"], "podSelector": {"matchLabels": {"app": "epp"}}}
    settings = {"kv_events": "tcp://*:5557", "data_parallel": engines}
    objects = valid(model(router={**POOL, "endpointPicker": picker}, settings=settings))
    assert ingress(objects)[-1] == {
        "ports": [{"port": 5557, "endPort": 5557 + engines - 1, "protocol": "TCP"}],
        "from": [{"podSelector": picker["podSelector"]}],
    }
    ports = container(objects.engines()["m"])["ports"]
    assert {"name": "kv-events", "containerPort": 5557} in ports


@pytest.mark.parametrize("address", [None, "tcp://router.serving:5557", "ipc:///tmp/events"])
def test_events_that_the_engine_carries_itself_open_nothing(address):
    objects = model(settings={"kv_events": address})
    assert ingress(objects) == ingress(model())
    assert len(container(objects.engines()["m"])["ports"]) == 1
