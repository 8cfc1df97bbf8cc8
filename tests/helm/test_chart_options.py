"""Each option: there when on, not there when off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chart import CHART, ROOT, Objects, container, environment, model, render

SECRET = {"name": "s", "key": "k"}
KEDA = {"kind": "keda", "prometheusUrl": "http://p:9090"}


def spec(objects: Objects) -> dict:
    """The engine's pod."""
    return objects.engines()["m"]["spec"]["template"]["spec"]


def volume(objects: Objects, name: str) -> dict:
    return next((v for v in spec(objects)["volumes"] if v["name"] == name), {})


MONITOR = {"kind": "serviceMonitor"}
VALKEY = {"enabled": True, "passwordSecret": SECRET}
ROUTER = {"kind": "vllmRouter"}
POOL = {"kind": "inferencePool", "endpointPicker": {"name": "epp"}}
ROUTE = {"enabled": True, "parentRefs": [{"name": "gateway"}]}


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
    assert len(render().of(kind)) == 1
    assert render(**values).of(kind) == []


def test_the_disk_tier_is_on_a_claim_that_comes_back_with_the_pod():
    objects = model(
        settings={"disk_gib": 100, "tensor_parallel": 2}, disk={"storageClassName": "x"}
    )
    workload = objects.one("StatefulSet")["spec"]
    [claim] = workload["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "x"
    # Of each device, and a tenth for headers and the file system.
    assert claim["spec"]["resources"]["requests"]["storage"] == "220Gi"
    assert (
        workload["serviceName"]
        == objects.one("Service", "kv-lmcache-xpu-m-engine")["metadata"]["name"]
    )
    assert workload["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    assert "kv" not in [v["name"] for v in workload["template"]["spec"]["volumes"]]


def test_the_disk_tier_may_be_the_nodes():
    objects = model(settings={"disk_gib": 10}, disk={"kind": "hostPath", "hostPath": "/mnt/kv"})
    assert volume(objects, "kv")["hostPath"] == {"path": "/mnt/kv", "type": "Directory"}
    [apart] = spec(objects)["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    labels = objects.engines()["m"]["spec"]["template"]["metadata"]["labels"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels.items()
    assert objects.engines()["m"]["spec"]["strategy"] == {"type": "Recreate"}


def test_the_disk_tier_may_end_with_the_pod():
    objects = model(settings={"disk_gib": 10}, disk={"kind": "emptyDir"})
    assert volume(objects, "kv")["emptyDir"] == {"sizeLimit": "11Gi"}


def test_no_disk_tier_no_volume():
    assert volume(model(), "kv") == {}
    assert "kv" not in [m["name"] for m in container(model().engines()["m"])["volumeMounts"]]


@pytest.mark.parametrize("resource", ["gpu.intel.com/xe", "gpu.intel.com/i915"])
def test_gpus_of_the_device_plugin(resource):
    objects = model(gpu={"resource": resource}, settings={"tensor_parallel": 2})
    assert container(objects.engines()["m"])["resources"]["limits"][resource] == "2"
    assert spec(objects)["securityContext"]["supplementalGroups"] == [992]
    [term] = spec(objects)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["key"] == "intel.feature.node.kubernetes.io/gpu"
    assert "resourceClaims" not in spec(objects)
    both = {"tensor_parallel": 2, "pipeline_parallel": 3}
    objects = model(gpu={"resource": resource}, settings=both)
    assert container(objects.engines()["m"])["resources"]["limits"][resource] == "6"


def test_only_nodes_with_certain_gpus():
    objects = model(gpu={"deviceIds": ["e211", "e20b"]})
    terms = spec(objects)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    # Terms are alternatives.
    assert [term["matchExpressions"][1]["key"] for term in terms] == [
        "gpu.intel.com/device-id.0300-e211.present",
        "gpu.intel.com/device-id.0300-e20b.present",
    ]


def test_gpus_of_the_dra_driver():
    objects = model(gpu={"kind": "dra", "selectors": ["x == 'y'"]}, settings={"tensor_parallel": 2})
    request = objects.one("ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]
    assert request["exactly"]["deviceClassName"] == "gpu.intel.com"
    assert request["exactly"]["count"] == 2
    assert request["exactly"]["selectors"] == [{"cel": {"expression": "x == 'y'"}}]
    [claim] = spec(objects)["resourceClaims"]
    template = objects.one("ResourceClaimTemplate")["metadata"]["name"]
    assert claim["resourceClaimTemplateName"] == template
    resources = container(objects.engines()["m"])["resources"]
    assert resources["claims"] == [{"name": claim["name"]}]
    assert not [name for name in resources["limits"] if "gpu" in name]


def test_no_gpu_asks_for_none():
    objects = model(gpu={"kind": "none", "renderGroups": None})
    resources = container(objects.engines()["m"])["resources"]
    assert resources.keys() == {"requests", "limits"}
    assert resources["limits"].keys() == {"memory"}
    assert "affinity" not in spec(objects)
    assert "supplementalGroups" not in spec(objects)["securityContext"]
    assert "/cpu:" in container(objects.engines()["m"])["image"]


@pytest.mark.parametrize("download", [True, False])
def test_a_pod_may_be_guaranteed_and_so_have_cores_of_its_own(download):
    """As docs/guides/numa.md sets it: requests and limits of all containers are equal."""
    keys = {"cpus": 8, "files": {"download": download}, "settings": {"cpu_gib": 24}}

    def unequal(**more: object) -> list[tuple[str, str]]:
        pod = spec(model(**keys, **more))
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
    assert spec(objects)["terminationGracePeriodSeconds"] == 5 + 90 + 30
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[kind]["httpGet"] == {"path": "/health", "port": "http"}


def test_new_settings_make_new_pods_and_nothing_else_does():
    def pods(**keys: object) -> dict:
        return model(**keys).engines()["m"]["spec"]["template"]

    assert pods() != pods(settings={"cpu_gib": 17})
    assert pods() == pods(replicas=2)


def test_files_from_a_claim_are_read_only():
    objects = model(files={"modelClaim": "models"}, settings={"model": "/models/a"})
    assert volume(objects, "models")["persistentVolumeClaim"] == {
        "claimName": "models",
        "readOnly": True,
    }


def test_a_download_comes_before_the_engine_which_then_stays_offline():
    objects = model(files={"download": True, "tokenSecret": SECRET})
    [download] = spec(objects)["initContainers"]
    assert download["command"] == ["hf", "download", "org/model"]
    assert "HF_TOKEN" in [item["name"] for item in download["env"]]
    engine = container(objects.engines()["m"])
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]
    assert {"name": "hub", "mountPath": "/cache/huggingface"} in download["volumeMounts"]
    assert "initContainers" not in spec(model())


def test_the_download_command_is_one_that_the_hubs_program_takes():
    program = Path(sys.executable).with_name("hf")
    shown = subprocess.run([program, "download", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "REPO_ID" in shown.stdout


def test_caches_are_where_the_pod_may_write():
    engine = container(model().engines()["m"])
    paths = [mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")]
    for item in engine["env"]:
        if item["name"] in ("HOME", "HF_HOME"):
            assert item["value"] in paths
    assert {"/tmp", "/dev/shm"} <= set(paths)
    assert volume(model(shmGib=9), "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}


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
    assert "topologySpreadConstraints" not in spec(objects)


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


def test_autoscaling_decides_the_number_of_pods_alone():
    assert model(replicas=2).engines()["m"]["spec"]["replicas"] == 2
    first = {**KEDA, "minReplicas": 2}
    assert model(autoscaling=first).engines()["m"]["spec"]["replicas"] == 2
    scaled = model(autoscaling=KEDA, settings={"disk_gib": 1}).one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["kind"] == "StatefulSet"


def test_keda_starts_from_zero_with_a_trigger_of_the_users():
    own = {"type": "nats-jetstream", "metadata": {"stream": "requests"}}
    zero = {"kind": "keda", "minReplicas": 0, "triggers": [own]}
    objects = model(autoscaling=zero)
    scaled = objects.one("ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["triggers"]) == (0, [own])
    assert objects.engines()["m"]["spec"]["replicas"] == 0
    both = model(autoscaling={**KEDA, **zero}).one("ScaledObject")["spec"]["triggers"]
    assert [trigger.get("name") for trigger in both] == [None, "waiting", "ttft"]


def test_keda_logs_in_at_prometheus_and_has_a_number_for_when_it_is_away():
    scaled = model(autoscaling=KEDA).one("ScaledObject")["spec"]
    assert scaled["pollingInterval"] == 30
    assert "fallback" not in scaled
    assert not any("authenticationRef" in trigger for trigger in scaled["triggers"])
    changes = {
        "pollS": 10,
        "fallback": {"replicas": 3},
        "prometheusAuth": {"name": "prometheus", "modes": "bearer"},
    }
    scaled = model(autoscaling={**KEDA, **changes}).one("ScaledObject")["spec"]
    assert scaled["pollingInterval"] == 10
    assert scaled["fallback"] == {"failureThreshold": 3, "replicas": 3}
    reference = {"name": "prometheus", "kind": "TriggerAuthentication"}
    for trigger in scaled["triggers"]:
        assert trigger["authenticationRef"] == reference
        assert trigger["metadata"]["authModes"] == "bearer"
    # KEDA takes a fallback only where some trigger's metric is an average per pod.
    assert "AverageValue" in [trigger["metricType"] for trigger in scaled["triggers"]]


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
    pod = spec(objects)
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
    assert spec(objects)["imagePullSecrets"] == [{"name": "r"}]
    assert {o["metadata"]["labels"]["team"] for o in objects if "labels" in o["metadata"]} == {"x"}
    assert objects.one("ConfigMap", "kv-x")


def test_images_are_those_that_the_project_builds():
    """By the names that docker-bake.hcl gives them, and all from one place."""
    objects = render(
        image={"registry": "r.example:5000/kv", "tag": "1.2"},
        models={"n": {"gpu": {"kind": "none"}, "settings": {"model": "x"}}},
        defaults={"router": ROUTER},
        loadtest={"enabled": True, "model": "m"},
    )
    images = {c["image"] for _, pod in objects.pods() for c in pod["containers"]}
    assert images == {
        f"r.example:5000/kv/{name}:1.2" for name in ("xpu", "cpu", "router", "loadtest")
    }
    own = model(engineImage="other/engine:3", router={**ROUTER, "image": "other/router@sha256:1"})
    images = {c["image"] for _, pod in own.pods() for c in pod["containers"]}
    assert images == {"other/engine:3", "other/router@sha256:1"}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(model().engines()["m"])["image"] == f"lmcache-xpu/xpu:{version}"


def test_the_load_test_is_started_by_helm_test_or_at_once():
    [job] = render(loadtest={"enabled": True}).of("Job")
    assert job["metadata"]["name"] == "kv-lmcache-xpu-loadtest"
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [now] = render(loadtest={"enabled": True, "now": True}).of("Job")
    assert now["metadata"]["name"] == "kv-lmcache-xpu-loadtest-1"
    assert "annotations" not in now["metadata"]
    assert render().of("Job") == []
    labels = job["spec"]["template"]["metadata"]["labels"]
    # What the network policies let in.
    assert labels["app.kubernetes.io/component"] == "test"


def test_the_load_test_names_the_service_the_model_and_the_key():
    objects = render(
        defaults={"apiKeySecret": SECRET, "settings": {"served_model_name": "small"}},
        loadtest={"enabled": True, "reportClaim": "r"},
    )
    [(_, pod)] = [(where, pod) for where, pod in objects.pods() if where.startswith("Job/")]
    [locust] = pod["containers"]
    assert "--host=http://kv-lmcache-xpu-m:80" in locust["args"]
    assert "--model=small" in locust["args"]
    key = locust["env"][-1]
    assert (key["name"], key["valueFrom"]["secretKeyRef"]) == ("LOCUST_API_KEY", SECRET)
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "r"}
