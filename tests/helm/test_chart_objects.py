"""Every object of every shape is one that Kubernetes takes, and safe unless told otherwise."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest
from chart import CI_FILES, environment, render, render_file, shapes

# The oldest and the newest that the validator knows and the chart's DRA objects exist in.
KUBERNETES = ("1.34", "1.37")
# Custom resources, whose schemas the validator lacks: the keys that each has to have.
CUSTOM = {
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "PrometheusRule": ("monitoring.coreos.com/v1", {"groups"}),
    "ScaledObject": ("keda.sh/v1alpha1", {"scaleTargetRef", "triggers"}),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "rules"}),
    "InferencePool": (
        "inference.networking.k8s.io/v1",
        {"selector", "targetPorts", "endpointPickerRef"},
    ),
}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_every_object_is_valid(path, version):
    objects = shapes()[path.name.removesuffix("-values.yaml")]
    assert objects
    for item in objects:
        if item["kind"] in CUSTOM:
            api, keys = CUSTOM[item["kind"]]
            assert item["apiVersion"] == api
            assert keys <= item["spec"].keys()
        else:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_validator_sees_mistakes():
    """Or the test above would show nothing."""
    [(_, broken)] = render().engines().items()
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


def test_the_shapes_use_every_template_and_custom_resource():
    kinds = {item["kind"] for objects in shapes().values() for item in objects}
    assert kinds >= set(CUSTOM)
    assert kinds >= {"StatefulSet", "Deployment", "ResourceClaimTemplate", "Ingress", "Pod"}
    assert "HorizontalPodAutoscaler" in kinds


def test_names_are_unique():
    for objects in shapes().values():
        names = [(item["kind"], item["metadata"]["name"]) for item in objects]
        assert len(set(names)) == len(names)


def test_every_selector_finds_its_pods_and_no_others():
    for objects in shapes().values():
        for workload in [*objects.of("Deployment"), *objects.of("StatefulSet")]:
            labels = workload["spec"]["template"]["metadata"]["labels"]
            assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        pods = [
            item["spec"]["template"]["metadata"]["labels"]
            for item in [*objects.of("Deployment"), *objects.of("StatefulSet")]
        ]
        for service in objects.of("Service"):
            selector = service["spec"]["selector"].items()
            assert sum(selector <= labels.items() for labels in pods) == 1, service["metadata"]


def test_ports_are_found_by_name_and_those_of_init_containers_by_number():
    for objects in shapes().values():
        there = set()
        for _, spec in objects.pods():
            for container in spec["containers"]:
                there |= {port["name"] for port in container.get("ports", [])}
            for container in spec.get("initContainers", []):
                there |= {port["containerPort"] for port in container.get("ports", [])}
        for service in objects.of("Service"):
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= there


@pytest.mark.parametrize("path", [None, *CI_FILES], ids=lambda path: path.name if path else "none")
def test_nothing_is_privileged_and_resources_are_set(path):
    objects = render_file(path) if path else render(valkey=VALKEY, models=ROUTED)
    for where, spec in objects.pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), where
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, where
        assert security["runAsUser"] > 0, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["enableServiceLinks"] is False, where
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]} | _more(container),
            }, where
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), where
            assert "memory" in container["resources"]["limits"], where
            tag = container["image"].rpartition(":")[2]
            assert tag not in ("", "latest", container["image"]), where


def _more(container: dict) -> dict:
    """What an engine of several GPUs has besides: test_chart_gpus.py has the others."""
    gpus = {"LMCACHE_XPU_TENSOR_PARALLEL", "LMCACHE_XPU_PIPELINE_PARALLEL"}
    several = container["name"] == "engine" and gpus & {each["name"] for each in container["env"]}
    return {"add": ["SYS_PTRACE"]} if several else {}


VALKEY = {"enabled": True, "passwordSecret": {"name": "v", "key": "p"}}
ROUTED = {"m": {"router": {"kind": "vllmRouter"}}}


def test_only_routers_get_a_token_of_the_api():
    for objects in shapes().values():
        for where, spec in objects.pods():
            wanted = where.endswith("-router")
            assert spec["automountServiceAccountToken"] is wanted, where


def test_secrets_come_by_reference_alone():
    """Nothing that is rendered may hold one: whoever reads the release would have it."""
    schema = json.dumps(render(models={"m": {"apiKeySecret": {"name": "api", "key": "k"}}}))
    assert "API_KEY" in schema
    from chart_schema import CHARTS_OWN, settings_schema

    assert {"api_key", "remote_password"} <= CHARTS_OWN
    assert not {"api_key", "remote_password"} & settings_schema()["properties"].keys()


@pytest.mark.parametrize("routed", [False, True])
def test_engines_let_in_their_router_the_monitor_and_the_tests(routed):
    objects = render(models=ROUTED if routed else {})
    policy = objects.one("NetworkPolicy", "kv-lmcache-xpu-m-engine")["spec"]
    [rule] = policy["ingress"]
    components = [
        peer["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component")
        for peer in rule["from"]
        if "podSelector" in peer
    ]
    # Without a router the clients talk to the engines themselves: any pod of the namespace.
    assert components == (["test", "router"] if routed else ["test", None])
    spaces = [peer["namespaceSelector"] for peer in rule["from"] if "namespaceSelector" in peer]
    assert spaces == [{"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}]
    labels = objects.engines()["m"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_memory_asked_for_holds_the_tiers():
    for objects in shapes().values():
        for workload in objects.engines().values():
            [engine] = workload["spec"]["template"]["spec"]["containers"]
            asked = engine["resources"]["requests"]["memory"]
            data = environment(workload)
            devices = int(data.get("LMCACHE_XPU_TENSOR_PARALLEL", 1))
            assert asked.endswith("Gi")
            if data.get("LMCACHE_XPU_CACHE") == "server":
                assert "LMCACHE_XPU_CPU_GIB" not in data  # test_chart_side_car.py has the server's
                continue
            assert int(asked[:-2]) >= float(data["LMCACHE_XPU_CPU_GIB"]) * devices + 5
