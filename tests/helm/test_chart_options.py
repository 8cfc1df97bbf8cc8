"""Each option: there when on, not there when off."""

from __future__ import annotations

import json

import pytest
import yaml
from chart import (
    CHART,
    KEDA,
    MODEL,
    POOL,
    REGISTRY,
    ROOT,
    ROUTE,
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

MONITOR = {"kind": "serviceMonitor"}


@pytest.mark.parametrize(
    ("values", "kind", "end"),
    [
        ({"monitor": MONITOR}, "ServiceMonitor", ""),
        ({"monitor": {"kind": "podMonitor"}}, "PodMonitor", ""),
        ({"monitor": MONITOR, "defaults": {"router": ROUTER}}, "PodMonitor", "-router"),
        ({"monitor": {"rules": True}}, "PrometheusRule", ""),
        ({"monitor": {"dashboard": True}}, "ConfigMap", "-dashboard"),
        ({"valkey": VALKEY}, "Deployment", "-valkey"),
        ({"valkey": VALKEY}, "Service", "-valkey"),
        ({"valkey": VALKEY}, "NetworkPolicy", "-valkey"),
        ({"defaults": {"autoscaling": {"kind": "hpa"}}}, "HorizontalPodAutoscaler", ""),
        ({"defaults": {"autoscaling": KEDA}}, "ScaledObject", ""),
        ({"defaults": {"ingress": {"enabled": True, "host": "a.b"}}}, "Ingress", ""),
        ({"defaults": {"httpRoute": ROUTE}}, "HTTPRoute", ""),
        ({"defaults": {"gpu": {"kind": "dra"}}}, "ResourceClaimTemplate", ""),
        ({"defaults": {"files": {"cache": "volumeClaim"}}}, "PersistentVolumeClaim", ""),
        ({"defaults": {"router": ROUTER}}, "Deployment", "-router"),
        ({"defaults": {"router": ROUTER}}, "Role", ""),
        ({"defaults": {"router": ROUTER}}, "RoleBinding", ""),
        ({"defaults": {"router": ROUTER}}, "ServiceAccount", "-router"),
        ({"defaults": {"router": ROUTER}}, "NetworkPolicy", "-router"),
        ({"defaults": {"router": POOL}}, "InferencePool", ""),
        ({"defaults": {"settings": {"disk_gib": 5}}}, "StatefulSet", ""),
        ({"extraObjects": [{"kind": "Event", "metadata": {"name": "x"}}]}, "Event", ""),
    ],
)
def test_an_object_is_there_when_asked_for_and_not_otherwise(values, kind, end):
    def objects_of_kind(objects: Objects) -> list[dict]:
        return [o for o in objects.of(kind) if o["metadata"]["name"].endswith(end)]

    assert len(objects_of_kind(render(**values))) == 1
    assert objects_of_kind(render()) == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"networkPolicy": {"enabled": False}}, "NetworkPolicy"),
        ({"serviceAccount": {"create": False}}, "ServiceAccount"),
        ({"defaults": {"podDisruptionBudget": {"enabled": False}}}, "PodDisruptionBudget"),
    ],
)
def test_an_object_is_there_unless_switched_off(values, kind):
    assert render().of(kind)
    assert render(**values).of(kind) == []


@pytest.mark.parametrize("download", [True, False])
def test_a_pod_may_be_guaranteed_and_so_have_cores_of_its_own(download):
    """As docs/guides/numa.md sets it: requests and limits of all containers are equal."""
    keys = {"cpus": 8, "files": {"download": download}, "settings": {"cpu_gib": 24}}

    def unequal(**more: object) -> list[tuple[str, str]]:
        pod = engine_pod(model(**keys, **more))
        return [
            (each["name"], kind)
            for each in [*pod.get("initContainers", []), *pod["containers"]]
            for kind in ("cpu", "memory")
            if each["resources"]["requests"][kind] != each["resources"]["limits"].get(kind)
        ]

    assert unequal(resources={"limits": {"cpu": "8"}}) == []
    assert unequal() == [("engine", "cpu")]


def test_the_time_to_start_and_to_stop():
    objects = model(startup={"limitS": 605}, settings={"drain_s": 90}, stop={"preStopS": 5})
    engine = container(objects.engines()["m"])
    probe = engine["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 605
    assert engine["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    # Nothing is cut off: waiting, draining, and the engine's own end.
    assert engine_pod(objects)["terminationGracePeriodSeconds"] == 5 + 90 + 30
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[kind]["httpGet"] == {"path": "/health", "port": "http"}


def test_new_settings_make_new_pods_and_nothing_else_does():
    def pods(**keys: object) -> dict:
        return model(**keys).engines()["m"]["spec"]["template"]

    assert pods() != pods(settings={"cpu_gib": 17})
    assert pods() == pods(replicas=2)


def test_several_models_share_nothing_but_the_account():
    objects = render(models={"n": {"settings": {"model": "b"}, "gpu": {"renderGroups": []}}})
    assert set(objects.engines()) == {"m", "n"}
    first, second = (w["spec"]["selector"]["matchLabels"] for w in objects.engines().values())
    assert first != second
    assert len(objects.of("Pod")) == 2  # a test for each


def test_a_models_own_values_win_also_when_they_are_empty_or_false():
    defaults = {"settings": {"prefix_caching": True, "drain_s": 60}, "replicas": 3, "spread": True}
    own = {"settings": {"prefix_caching": False, "drain_s": 0}, "replicas": 0, "spread": False}
    objects = render(defaults=defaults, models={"m": own})
    data = environment(objects.engines()["m"])
    assert (data["LMCACHE_XPU_PREFIX_CACHING"], data["LMCACHE_XPU_DRAIN_S"]) == ("false", "0")
    assert objects.engines()["m"]["spec"]["replicas"] == 0
    assert "topologySpreadConstraints" not in engine_pod(objects)


def test_the_shared_tier_is_a_setting_of_every_engine_and_its_password_a_secret():
    objects = render(valkey={**VALKEY, "gib": 8})
    data = environment(objects.engines()["m"])
    service = objects.one("Service", "kv-lmcache-xpu-valkey")
    assert data["LMCACHE_XPU_REMOTE_URL"] == f"redis://{service['metadata']['name']}:6379"
    password = {"name": "s", "key": "k"}
    engine = container(objects.engines()["m"])["env"][-1]
    assert engine["valueFrom"]["secretKeyRef"] == password
    server = container(objects.one("Deployment", "kv-lmcache-xpu-valkey"), "valkey")
    assert server["env"][0]["valueFrom"]["secretKeyRef"] == password
    assert "--maxmemory 8192mb" in server["args"][0]
    assert server["resources"]["limits"]["memory"] == "11Gi"


def test_the_service_that_clients_use_stays_when_a_router_comes():
    plain, routed = model(), model(router=ROUTER)
    for objects, component in ((plain, "engine"), (routed, "router")):
        service = objects.one("Service", "kv-lmcache-xpu-m")["spec"]
        assert service["selector"]["app.kubernetes.io/component"] == component
        assert service["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_a_route_leads_to_the_pool_when_there_is_one():
    [ref] = model(httpRoute=ROUTE, router=POOL).one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (ref["kind"], ref["name"]) == ("InferencePool", "kv-lmcache-xpu-m")
    [ref] = model(httpRoute=ROUTE).one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (ref["name"], ref["port"]) == ("kv-lmcache-xpu-m", 80)


def test_metrics_and_health_are_not_on_the_ingress():
    ingress = model(ingress={"enabled": True, "host": "a.b", "tlsSecret": "t"}).one("Ingress")
    [rule] = ingress["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    assert ingress["spec"]["tls"] == [{"secretName": "t", "hosts": ["a.b"]}]


def test_the_job_of_the_monitors_is_the_one_of_the_alert_rules():
    """Alerts and dashboard look for it; the operator would take the service's name."""
    rules = (ROOT / "monitoring" / "alerts.yaml").read_text()
    assert "lmcache-xpu" in yaml.safe_load(rules)["groups"][0]["rules"][0]["expr"]
    for kind, key in (("serviceMonitor", "endpoints"), ("podMonitor", "podMetricsEndpoints")):
        objects = render(monitor={"kind": kind}, nameOverride="x", fullnameOverride="y")
        [endpoint] = objects.one(kind[0].upper() + kind[1:])["spec"][key]
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "lmcache-xpu"}]
        assert endpoint["path"] == "/metrics"


def test_what_is_added_is_there():
    objects = model(
        extraEnv=[{"name": "ZE_AFFINITY_MASK", "value": "0"}],
        extraVolumes=[{"name": "v", "emptyDir": {}}],
        extraVolumeMounts=[{"name": "v", "mountPath": "/v"}],
        podLabels={"a": "b"},
        podAnnotations={"c": "d"},
        nodeSelector={"disk": "nvme"},
        tolerations=[{"operator": "Exists"}],
        affinity={"podAffinity": {}},
        priorityClassName="high",
        runtimeClassName="kata",
        podSecurityContext={"fsGroup": 5},
        resources={"requests": {"cpu": "9"}},
        topologySpreadConstraints=[{"maxSkew": 2}],
    )
    text = json.dumps(objects.engines()["m"]["spec"]["template"])
    for part in ("ZE_AFFINITY_MASK", '"/v"', '"a": "b"', '"c": "d"', '"nvme"', "Exists", '"high"'):
        assert part in text
    pod = engine_pod(objects)
    assert pod["affinity"] == {"podAffinity": {}}
    assert pod["runtimeClassName"] == "kata"
    assert pod["securityContext"]["fsGroup"] == 5
    assert pod["securityContext"]["runAsNonRoot"] is True
    resources = container(objects.engines()["m"])["resources"]
    assert resources["requests"] == {
        "cpu": "9",
        "memory": "36Gi",
        "ephemeral-storage": "110Gi",  # the hub's cache and what compiles
    }
    assert pod["topologySpreadConstraints"] == [{"maxSkew": 2}]
    objects = render(
        imagePullSecrets=[{"name": "r"}],
        commonLabels={"team": "x"},
        extraObjects=[{"kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}],
    )
    assert engine_pod(objects)["imagePullSecrets"] == [{"name": "r"}]
    assert {o["metadata"]["labels"]["team"] for o in objects if "labels" in o["metadata"]} == {"x"}
    assert objects.one("ConfigMap", "kv-x")


def test_images_are_those_that_the_project_builds():
    """By the names that docker-bake.hcl gives them, and all from one place."""
    objects = render(
        image={"registry": "r.example:5000/kv", "tag": "1.2"},
        models={"n": {"gpu": {"kind": "none"}, "settings": {"model": "x"}}},
        defaults={"router": ROUTER},
    )
    images = {c["image"] for _, pod in objects.pods() for c in pod["containers"]}
    assert images == {f"r.example:5000/kv/{name}:1.2" for name in ("xpu", "cpu", "router")}
    own = model(engineImage="other/engine:3", router={**ROUTER, "image": "other/router@sha256:1"})
    images = {c["image"] for _, pod in own.pods() for c in pod["containers"]}
    assert images == {"other/engine:3", "other/router@sha256:1"}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(model().engines()["m"])["image"] == f"{REGISTRY}/xpu:{version}"


def test_no_image_is_pulled_from_a_stranger():
    """A name without a registry is Docker Hub's, where nobody of this project has it."""
    for values in ({}, {"models": {"m": {"engineImage": "e:1", "router": ROUTER}}}):
        done = template(values=merged(MODEL, {"image": {"registry": ""}, **values}))
        assert done.returncode
        assert "image.registry is not set; expected where you pushed" in done.stderr
    own = {"image": {"registry": ""}, "models": {"m": {"engineImage": "e:1"}}}
    assert template(values=merged(MODEL, own)).returncode == 0
