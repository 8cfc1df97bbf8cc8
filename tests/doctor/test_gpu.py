"""Checks of the GPU, on a planted machine."""

from __future__ import annotations

import os
import shutil

import pytest
from support.checks import B60, load, said

from lmcache_xpu.doctor import gpu
from lmcache_xpu.launch.machine import TorchFacts


def test_render_nodes_that_can_be_opened(machine):
    assert said(gpu.check_nodes(machine()), "ok", "renderD128, renderD129")


def test_no_render_node(machine, root):
    shutil.rmtree(root / "dev/dri")
    assert said(gpu.check_nodes(machine()), "fail", "--device /dev/dri", "gpu.intel.com")


def test_render_nodes_of_a_group_that_is_missing(machine):
    check = gpu.check_nodes(machine(may_open=lambda _: False))
    assert said(check, "fail", "renderD128", f"RENDER_GID={os.getgid()}")


def test_one_of_two_render_nodes(machine):
    check = gpu.check_nodes(machine(may_open=lambda path: path.name == "renderD129"))
    assert said(check, "warn", "renderD129; not renderD128")


def test_drivers_by_name(machine):
    assert said(gpu.check_driver(machine()), "ok", "xe, i915")


def test_other_makers_gpus_do_not_count(machine, root):
    for vendor in root.glob("sys/class/drm/*/device/vendor"):
        vendor.write_text("0x10de\n")
    assert said(gpu.check_driver(machine()), "fail", "no render node of an Intel GPU", "lspci")


def test_a_gpu_given_to_a_virtual_machine(machine, root):
    driver = root / "sys/class/drm/renderD128/device/driver"
    driver.unlink()
    driver.symlink_to(root / "sys/bus/pci/drivers/vfio-pci")
    assert said(gpu.check_driver(machine()), "fail", "vfio-pci", "xe")


@pytest.mark.parametrize("missing", ["libze_loader.so.1", "libze_intel_gpu.so.1"])
def test_a_runtime_without_level_zero(machine, missing):
    check = gpu.check_runtime(machine(loads=lambda name: name != missing))
    assert said(check, "fail", missing, "image")


def test_either_sycl_will_do_and_none_will_not(machine):
    old = machine(loads=lambda name: name != "libsycl.so.9")
    assert said(gpu.check_runtime(old), "ok", "libsycl.so.8")
    none = machine(loads=lambda name: "sycl" not in name)
    assert said(gpu.check_runtime(none), "fail", "libsycl.so.9", "intel-sycl-rt")


def test_what_pytorch_sees():
    assert said(gpu.check_torch(B60, load()), "ok", "Arc Pro B60 (24 GiB)")
    assert said(gpu.check_torch(TorchFacts("2.13.0+cpu"), load()), "fail", "2.13.0+cpu", "+xpu")
    two = load(tensor_parallel=2)
    assert said(gpu.check_torch(B60, two), "fail", "tensor_parallel=2:", "ZE_AFFINITY_MASK")
    eight = load(tensor_parallel=2, pipeline_parallel=2, data_parallel=2)
    product = "tensor_parallel=2 x pipeline_parallel=2 x data_parallel=2"
    assert said(gpu.check_torch(B60, eight), "fail", product)


def test_handles_of_device_memory_pass_between_processes(machine):
    assert said(gpu.check_handles(machine()), "ok", "pidfd_getfd")
    check = gpu.check_handles(machine(refusal=lambda: "Operation not permitted"))
    assert said(check, "warn", "Operation not permitted", "SYS_PTRACE", "gpu.sysPtrace")
    assert "docker/several-cards.yaml" in check.advice


def test_a_b70_is_told_of_its_copy_engine_until_the_variable_is_set(machine, root):
    assert said(gpu.check_copy_engine(machine()), "ok", "no Arc Pro B70")
    (root / "sys/class/drm/renderD129/device/device").write_text("0xe223\n")
    name = "UR_L0_V2_FORCE_DISABLE_COPY_OFFLOAD"
    assert said(gpu.check_copy_engine(machine()), "warn", name, "vllm#41663")
    for value in ("0", "1"):
        check = gpu.check_copy_engine(machine(environ={name: value}))
        assert said(check, "ok", f"{name}={value}")
