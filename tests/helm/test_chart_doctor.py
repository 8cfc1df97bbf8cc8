"""In the pods of every example, our own doctor has nothing against the memory."""

from __future__ import annotations

import pytest
from chart import CI_FILES, container, model, settings, shapes

from lmcache_xpu.doctor import memory
from lmcache_xpu.launch.machine import Machine, TorchFacts

GIB = 2**30
B60 = TorchFacts("2.14.0+xpu", (("Intel Arc Pro B60", 24 * GIB),) * 4)


@pytest.fixture
def pod(tmp_path):
    """A pod of so many GiB, on a node with a tenth more, as docs/guides/kubernetes.md asks for."""

    def make(limit: str) -> Machine:
        assert limit.endswith("Gi")
        gib = int(limit[:-2])
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(gib * GIB))
        (tmp_path / "proc").mkdir(exist_ok=True)
        kib = int(1.1 * gib * 2**20)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
        return Machine(root=tmp_path, environ={})

    return make


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_the_doctor_passes_every_example(path, pod, monkeypatch):
    objects = shapes()[path.name.removesuffix("-values.yaml")]
    for workload in objects.engines().values():
        loaded = settings(objects, workload, monkeypatch)
        machine = pod(container(workload)["resources"]["limits"]["memory"])
        monkeypatch.setattr(memory, "check_server", lambda url: None)  # a side-car's runs before
        assert memory.check_memory(machine, loaded).outcome == "ok"
        if loaded.device == "xpu":
            assert memory.check_pinned(machine, loaded, B60.gpus).outcome == "ok"


def test_every_engine_of_data_parallelism_has_its_own(pod, monkeypatch):
    """Tiers and GPUs are per device, in the chart as in the doctor."""
    objects = model(
        settings={"data_parallel": 2, "tensor_parallel": 2, "cpu_gib": 10, "disk_gib": 100}
    )
    [workload] = objects.engines().values()
    resources = container(workload)["resources"]
    assert resources["limits"]["gpu.intel.com/xe"] == "4"
    assert resources["requests"]["memory"] == "60Gi"  # 16 + 4 + the tiers
    assert resources["limits"]["memory"] == "100Gi"  # their server may start anew
    [claim] = workload["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "440Gi"
    loaded = settings(objects, workload, monkeypatch)
    assert loaded.devices == 4
    assert "40 GiB in all" in memory.check_memory(pod("60Gi"), loaded).found
