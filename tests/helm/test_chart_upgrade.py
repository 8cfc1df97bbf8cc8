"""An upgrade leaves what runs alone until it can take its place."""

from __future__ import annotations

import pytest
from chart import REGISTRY, merged, model, render

OBJECT = "kv-lmcache-xpu-m"


def test_settings_belong_to_the_pods_so_that_a_refused_upgrade_changes_none():
    """Helm patches objects one by one. What the pods that run read must not be among them."""
    assert render().of("ConfigMap") == []
    variables = {
        item["name"]: item.get("value")
        for item in render().engines()["m"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert variables["LMCACHE_XPU_CPU_GIB"] == "16"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"tensor_parallel": 2}},
        {"gpu": {"kind": "dra", "count": 3}},
        {"gpu": {"kind": "dra", "selectors": ["x"]}},
        {"gpu": {"kind": "dra", "deviceClassName": "other"}},
    ],
)
def test_a_claim_template_is_never_changed_in_place(change):
    def templates(**keys: object) -> set[str]:
        objects = model(**{"gpu": {"kind": "dra"}, **keys})
        return {item["metadata"]["name"] for item in objects.of("ResourceClaimTemplate")}

    assert not templates() & templates(**change)
    assert templates() == templates(replicas=2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_helm_waits_for_the_only_pod(replicas):
    """Helm counts a Deployment as ready that lacks as many pods as may be unavailable."""
    strategy = model(replicas=replicas).engines()["m"]["spec"]["strategy"]
    missing = strategy.get("rollingUpdate", {}).get("maxUnavailable", 0)
    assert replicas - missing >= 1


def test_a_start_has_the_time_it_is_given_before_its_rollout_counts_as_stuck():
    def deadline_s(**keys: object) -> int:
        return model(**keys).engines()["m"]["spec"]["progressDeadlineSeconds"]

    slow = {"startup": {"limitS": 3000}}
    assert deadline_s(**slow) >= 3000 + 60 + 10 + 30
    assert deadline_s(**slow, files={"download": True}) - deadline_s(**slow) == 3600


def test_the_log_of_a_passed_test_is_still_there_for_helm_test():
    policy = render().one("Pod")["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert policy == "before-hook-creation"


def test_what_was_downloaded_and_compiled_outlives_the_release_and_the_pod():
    objects = model(files={"cache": "volumeClaim"})
    claim = objects.one("PersistentVolumeClaim")["metadata"]
    assert claim["annotations"]["helm.sh/resource-policy"] == "keep"
    mounts = objects.engines()["m"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    caches = {mount["mountPath"]: mount for mount in mounts if mount["name"] == "hub"}
    assert caches["/cache"]["subPath"] == "compiled"
    assert "subPath" not in caches["/cache/huggingface"]


def test_two_namespaces_keep_their_kv_apart_on_one_node():
    def path(namespace: str) -> str:
        from chart import MODEL, container, merged, rendered, template

        keys = {"settings": {"disk_gib": 5}, "disk": {"kind": "hostPath", "hostPath": "/kv"}}
        done = template("-n", namespace, values=merged(MODEL, {"models": {"m": keys}}))
        env = container(rendered(done).engines()["m"])["env"]
        return next(item["value"] for item in env if item["name"] == "LMCACHE_XPU_DISK_PATH")

    assert path("tenant-a") != path("tenant-b")
    assert path("tenant-a").startswith("/var/cache/kv/")


def test_the_nodes_own_disk_is_asked_for_as_far_as_it_may_be_filled():
    def asked(**keys: object) -> str:
        engine = model(**keys).engines()["m"]["spec"]["template"]["spec"]["containers"][0]
        return engine["resources"]["requests"]["ephemeral-storage"]

    tier = {"settings": {"disk_gib": 50}, "disk": {"kind": "emptyDir"}}
    assert asked() == "110Gi"  # the hub's cache, /tmp and what compiles
    assert asked(**tier) == "165Gi"
    assert asked(files={"cache": "existingClaim", "claimName": "hub"}) == "10Gi"


def test_a_download_is_as_the_engines_own_would_be():
    objects = model(
        files={
            "download": True,
            "revision": "v2",
            "include": ["*.safetensors"],
            "exclude": ["original/*"],
        },
        extraEnv=[{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    )
    pod = objects.engines()["m"]["spec"]["template"]["spec"]
    [download] = pod["initContainers"]
    options = ["--revision", "v2", "--include", "*.safetensors", "--exclude", "original/*"]
    assert download["command"] == ["hf", "download", "org/model", *options]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in download["env"]
    extra = {"name": "LMCACHE_XPU_EXTRA_ARGS", "value": "'--revision' 'v2'"}
    assert extra in pod["containers"][0]["env"]


POD = {
    "labels": {"team": "x"},
    "annotations": {"a": "b"},
    "nodeSelector": {"pool": "small"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 2}],
    "priorityClassName": "low",
}


def other_pods(**values: object) -> dict[str, tuple[dict, dict]]:
    """Metadata and spec of the pods of router, Valkey and test, by their component."""
    secret = {"name": "s", "key": "k"}
    objects = render(
        **merged(
            {
                "defaults": {"router": {"kind": "vllmRouter"}},
                "valkey": {"enabled": True, "passwordSecret": secret},
            },
            values,
        )
    )
    templates = [item["spec"]["template"] for item in objects.of("Deployment")]
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: (pod["metadata"], pod["spec"])
        for pod in [*templates, *objects.of("Pod")]
    }
    del pods["engine"]
    assert pods.keys() == {"router", "valkey", "test"}
    return pods


@pytest.mark.parametrize(
    "values",
    [
        {"otherPods": POD},
        {
            "defaults": {"router": {"pod": POD}},
            "valkey": {"pod": POD},
            "tests": {"pod": POD},
        },
    ],
)
def test_every_pod_can_be_placed(values):
    places = {key: value for key, value in POD.items() if key not in ("labels", "annotations")}
    for part, (metadata, spec) in other_pods(**values).items():
        assert places.items() <= spec.items(), part
        assert metadata["labels"]["team"] == "x", part
        assert metadata["annotations"]["a"] == "b", part


def test_a_parts_own_place_wins():
    own = {"labels": {"team": "y"}, "tolerations": [], "nodeSelector": {"disk": "nvme"}}
    pods = other_pods(otherPods=POD, valkey={"pod": own})
    metadata, spec = pods["valkey"]
    assert metadata["labels"]["team"] == "y"
    assert spec["nodeSelector"] == {"pool": "small", "disk": "nvme"}
    assert "tolerations" not in spec
    assert pods["router"][1]["tolerations"] == POD["tolerations"]


def test_routers_are_spread_and_drained_one_by_one():
    objects = model(router={"kind": "vllmRouter", "replicas": 2})
    spec = objects.one("Deployment", f"{OBJECT}-router")["spec"]
    assert spec["replicas"] == 2
    [rule] = spec["template"]["spec"]["topologySpreadConstraints"]
    selector = spec["selector"]["matchLabels"]
    assert rule["labelSelector"]["matchLabels"] == selector
    budget = objects.one("PodDisruptionBudget", f"{OBJECT}-router")["spec"]
    assert budget["selector"]["matchLabels"] == selector


def test_the_endpoint_picker_may_read_the_engines_metrics():
    picker = {"name": "epp", "podSelector": {"matchLabels": {"app": "epp"}}}
    objects = render(
        networkPolicy={"clients": [{"namespaceSelector": {"matchLabels": {"name": "gateway"}}}]},
        models={"m": {"router": {"kind": "inferencePool", "endpointPicker": picker}}},
    )
    [rule] = objects.one("NetworkPolicy", f"{OBJECT}-engine")["spec"]["ingress"]
    assert {"podSelector": picker["podSelector"]} in rule["from"]


def test_images_can_be_pinned_by_digest():
    digest = "sha256:" + "0" * 64
    objects = render(image={"digests": {"xpu": digest}})
    [engine] = objects.engines()["m"]["spec"]["template"]["spec"]["containers"]
    assert engine["image"] == f"{REGISTRY}/xpu:0.1.0@{digest}"


def test_workloads_take_annotations():
    objects = model(annotations={"reloader.stakater.com/auto": "true"})
    assert objects.engines()["m"]["metadata"]["annotations"] == {
        "reloader.stakater.com/auto": "true"
    }
