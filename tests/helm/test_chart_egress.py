"""What the network policies let pods reach."""

from __future__ import annotations

import ipaddress

import pytest
from chart import (
    CI_FILES,
    MODEL,
    ROUTER,
    VALKEY,
    Objects,
    merged,
    model,
    render,
    render_file,
    template,
)

COMPONENT = "app.kubernetes.io/component"
HUB = [{"port": 443, "protocol": "TCP"}]


def labels(item: dict) -> dict[str, str]:
    """Of the pods that an object makes, or is."""
    template_ = item["spec"].get("template", item)
    return template_["metadata"]["labels"]


def policies(objects: Objects, pod: dict[str, str]) -> list[dict]:
    """The specs of those that select a pod with these labels."""
    specs = [policy["spec"] for policy in objects.of("NetworkPolicy")]
    return [spec for spec in specs if spec["podSelector"]["matchLabels"].items() <= pod.items()]


def reach(objects: Objects, component: str) -> list[dict]:
    """The rules of egress of a component's pods, but for names."""
    [policy] = [
        policy["spec"]
        for policy in objects.of("NetworkPolicy")
        if policy["metadata"]["labels"][COMPONENT] == component
    ]
    rules = policy.get("egress", [])
    names = [
        rule for rule in rules if {port["port"] for port in rule.get("ports", [])} == {53, 5353}
    ]
    assert len(names) == bool(rules)
    return [rule for rule in rules if rule not in names]


def components(rule: dict) -> list[str]:
    return [peer["podSelector"]["matchLabels"][COMPONENT] for peer in rule["to"]]


def within(peers: list[dict], address: str) -> bool:
    """Whether address blocks hold an address."""
    ip = ipaddress.ip_address(address)
    blocks = [peer["ipBlock"] for peer in peers]
    return any(
        ip in ipaddress.ip_network(block["cidr"])
        and not any(ip in ipaddress.ip_network(apart) for apart in block["except"])
        for block in blocks
        if ipaddress.ip_network(block["cidr"]).version == ip.version
    )


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_egress_of_every_pod_is_closed(path):
    objects = render_file(path)
    pods = [item for item in objects if item["kind"] in ("Deployment", "StatefulSet", "Pod")]
    assert pods
    for item in pods:
        [policy] = policies(objects, labels(item))
        assert policy["policyTypes"] == ["Ingress", "Egress"], item["metadata"]["name"]
        assert {} not in policy.get("egress", [])


def test_an_engine_reaches_the_hub_at_public_addresses_alone():
    [rule] = reach(render(), "engine")
    assert rule["ports"] == HUB
    for public in ("3.160.150.7", "2600:9000::1"):
        assert within(rule["to"], public)
    for inside in (
        "10.96.0.1",
        "172.20.1.1",
        "192.168.1.2",
        "169.254.169.254",
        "fd00::1",
        "fe80::1",
    ):
        assert not within(rule["to"], inside)


def test_a_mirror_stands_in_the_hubs_place_and_models_of_a_claim_need_neither():
    mirror = [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    assert reach(render(networkPolicy={"hub": mirror}), "engine") == [{"ports": HUB, "to": mirror}]
    assert reach(render(networkPolicy={"hub": []}), "engine") == []
    local = {"settings": {"model": "/models/m"}, "files": {"modelClaim": "models"}}
    assert reach(model(**local), "engine") == []


def test_the_charts_valkey_is_reached_by_engines_and_reaches_nobody():
    objects = render(valkey=VALKEY)
    shared = reach(objects, "engine")[-1]
    assert components(shared) == ["valkey"]
    [port] = objects.one("Service", "kv-lmcache-xpu-valkey")["spec"]["ports"]
    assert shared["ports"] == [{"port": port["port"], "protocol": "TCP"}]
    assert reach(objects, "valkey") == []


def test_routers_and_tests_reach_their_engines():
    objects = render(models={"m": {"router": ROUTER}})
    [to_engines] = reach(objects, "test")
    assert components(to_engines) == ["engine"]
    assert to_engines["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert to_engines["to"][0]["podSelector"]["matchLabels"]["lmcache-xpu/model"] == "m"
    engines, api = reach(objects, "router")
    assert engines == to_engines
    assert [port["port"] for port in api["ports"]] == [443, 6443]


@pytest.mark.parametrize(
    "settings",
    [
        {"remote_url": "redis://cache.example.com:6379"},
        {"cache": "server", "server_url": "tcp://10.1.2.3:6379"},
    ],
)
def test_a_server_of_yours_needs_a_rule(settings):
    own = {"models": {"m": {"settings": settings}}}
    refused = template(values=merged(MODEL, own))
    assert refused.returncode != 0
    assert "_url is " in refused.stderr
    assert "networkPolicy: {extraEgress: [" in refused.stderr
    rule = {"ports": [{"port": 6379}], "to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]}
    assert rule in reach(render(networkPolicy={"extraEgress": [rule]}, **own), "engine")
    assert not render(networkPolicy={"enabled": False}, **own).of("NetworkPolicy")


def test_everything_can_be_let_out():
    objects = render(networkPolicy={"extraEgress": [{}]})
    assert {} in reach(objects, "engine")
    assert {} not in reach(objects, "test")
