"""Where a pod's files are: the disk tier, models, downloads, caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from chart import SECRET, container, engine_pod, model, volume


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
    [apart] = engine_pod(objects)["affinity"]["podAntiAffinity"][
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


def test_files_from_a_claim_are_read_only():
    objects = model(files={"modelClaim": "models"}, settings={"model": "/models/a"})
    assert volume(objects, "models")["persistentVolumeClaim"] == {
        "claimName": "models",
        "readOnly": True,
    }


def test_a_download_comes_before_the_engine_which_then_stays_offline():
    objects = model(files={"download": True, "tokenSecret": SECRET})
    [download] = engine_pod(objects)["initContainers"]
    assert download["command"] == ["hf", "download", "org/model"]
    assert "HF_TOKEN" in [item["name"] for item in download["env"]]
    engine = container(objects.engines()["m"])
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]
    assert {"name": "hub", "mountPath": "/cache/huggingface"} in download["volumeMounts"]
    assert "initContainers" not in engine_pod(model())


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
