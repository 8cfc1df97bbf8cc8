"""A planted machine."""

from __future__ import annotations

import pytest
from support.checks import B60

from lmcache_xpu.launch.machine import Machine


@pytest.fixture
def root(tmp_path):
    """A machine with two Intel GPUs, 64 GiB of memory and 48 available."""
    for number, driver in ((128, "xe"), (129, "i915")):
        node = tmp_path / f"dev/dri/renderD{number}"
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
        device = tmp_path / f"sys/class/drm/renderD{number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x8086\n")
        (tmp_path / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / f"sys/bus/pci/drivers/{driver}")
    (tmp_path / "dev/shm").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"
    )
    (tmp_path / "proc/mounts").write_text(
        f"overlay / overlay rw 0 0\n/dev/nvme0n1 {tmp_path}/data ext4 rw 0 0\n"
    )
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def machine(root):
    def make(**changes):
        facts = {
            "root": root,
            "environ": {},
            "may_open": lambda _: True,
            "loads": lambda _: True,
            "torch": lambda: B60,
            "refusal": lambda: "",
        }
        return Machine(**facts | changes)

    return make
