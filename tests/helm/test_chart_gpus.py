"""How a pod asks for GPUs: of the device plugin, of the DRA driver, for none."""

from __future__ import annotations

import pytest
from chart import container, engine_pod, model, render


@pytest.mark.parametrize("resource", ["gpu.intel.com/xe", "gpu.intel.com/i915"])
def test_gpus_of_the_device_plugin(resource):
    objects = model(gpu={"resource": resource}, settings={"tensor_parallel": 2})
    assert container(objects.engines()["m"])["resources"]["limits"][resource] == "2"
    assert engine_pod(objects)["securityContext"]["supplementalGroups"] == [992]
    [term] = engine_pod(objects)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["key"] == "intel.feature.node.kubernetes.io/gpu"
    assert "resourceClaims" not in engine_pod(objects)
    both = {"tensor_parallel": 2, "pipeline_parallel": 3}
    objects = model(gpu={"resource": resource}, settings=both)
    assert container(objects.engines()["m"])["resources"]["limits"][resource] == "6"


def test_only_nodes_with_certain_gpus():
    objects = model(gpu={"deviceIds": ["e211", "e20b"]})
    terms = engine_pod(objects)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    # Terms are alternatives.
    assert [term["matchExpressions"][1]["key"] for term in terms] == [
        "gpu.intel.com/device-id.0300-e211.present",
        "gpu.intel.com/device-id.0380-e211.present",
        "gpu.intel.com/device-id.0300-e20b.present",
        "gpu.intel.com/device-id.0380-e20b.present",
    ]


@pytest.mark.parametrize(
    "label",
    [
        "gpu.intel.com/device-id.0300-e211.present",  # Arc Pro B60
        "gpu.intel.com/device-id.0380-0bd5.present",  # Data Center GPU Max 1550
        "gpu.intel.com/device-id.0380-56c0.present",  # Data Center GPU Flex 170
    ],
)
@pytest.mark.parametrize("kind", ["devicePlugin", "dra"])
def test_a_node_is_found_by_its_gpu_whatever_class_the_gpu_has(label, kind):
    """As the scheduler reads it: all expressions of some term."""
    device = label.removesuffix(".present").rpartition("-")[2]
    labels = {label: "true", "intel.feature.node.kubernetes.io/gpu": "true"}

    def fits(wanted: str) -> bool:
        pod = engine_pod(model(gpu={"kind": kind, "deviceIds": [wanted]}))
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return any(
            all(labels.get(each["key"]) in each["values"] for each in term["matchExpressions"])
            for term in required["nodeSelectorTerms"]
        )

    assert fits(device)
    assert not fits("ffff")


def test_gpus_of_the_dra_driver():
    objects = model(gpu={"kind": "dra", "selectors": ["x == 'y'"]}, settings={"tensor_parallel": 2})
    request = objects.one("ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]
    assert request["exactly"]["deviceClassName"] == "gpu.intel.com"
    assert request["exactly"]["count"] == 2
    assert request["exactly"]["selectors"] == [{"cel": {"expression": "x == 'y'"}}]
    [claim] = engine_pod(objects)["resourceClaims"]
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
    assert "affinity" not in engine_pod(objects)
    assert "supplementalGroups" not in engine_pod(objects)["securityContext"]
    assert "/cpu:" in container(objects.engines()["m"])["image"]


def capabilities(**keys):
    """Of each container of the pod, by name."""
    pod = engine_pod(model(**keys))
    return {
        each["name"]: each["securityContext"]["capabilities"]
        for each in pod["containers"] + pod.get("initContainers", [])
    }


NONE = {"drop": ["ALL"]}
SYS_PTRACE = {"drop": ["ALL"], "add": ["SYS_PTRACE"]}


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel"])
@pytest.mark.parametrize("kind", ["devicePlugin", "dra"])
def test_an_engine_of_several_gpus_may_take_its_own_handles(kind, name):
    keys = {"gpu": {"kind": kind}, "settings": {name: 2}, "files": {"download": True}}
    assert capabilities(**keys) == {"engine": SYS_PTRACE, "download": NONE}
    side_car = keys | {"cache": {"kind": "sideCar"}}
    assert capabilities(**side_car) == {"engine": SYS_PTRACE, "download": NONE, "server": NONE}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"settings": {"data_parallel": 4}},
        {"gpu": {"kind": "dra"}},
        {"gpu": {"kind": "none", "renderGroups": None}, "settings": {"tensor_parallel": 2}},
        {"gpu": {"sysPtrace": False}, "settings": {"tensor_parallel": 2}},
    ],
)
def test_no_other_engine_gets_a_right_more(keys):
    assert capabilities(**keys) == {"engine": NONE}


def test_where_the_cluster_gives_users_crio_lets_the_handles_through():
    several = {"models": {"m": {"settings": {"tensor_parallel": 2}}}}
    engine = container(render(clusterUsers=True, **several).engines()["m"])
    assert engine["securityContext"]["capabilities"] == NONE


def test_the_right_can_be_asked_for():
    """As models with experts and data_parallel need it."""
    keys = {"gpu": {"sysPtrace": True}, "settings": {"data_parallel": 4}}
    assert capabilities(**keys) == {"engine": SYS_PTRACE}
