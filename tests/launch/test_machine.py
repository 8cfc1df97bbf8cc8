"""What is read of a machine, on a planted one and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_xpu.launch.machine import Machine, TorchFacts

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"
    )
    return tmp_path


def test_memory_is_the_machine_s_or_the_container_s(root: Path):
    machine = Machine(root=root)
    assert machine.memory_bytes() == 64 * GIB
    assert machine.available_bytes() == 32 * GIB
    limit = root / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert machine.memory_bytes() == 64 * GIB
    limit.write_text(f"{16 * GIB}\n")
    assert machine.memory_bytes() == 16 * GIB


def test_a_path_is_on_the_longest_mount_that_holds_it(root: Path):
    (root / "proc/mounts").write_text(
        "overlay / overlay rw 0 0\n/dev/a /data ext4 rw 0 0\ntmpfs /data/kv tmpfs rw 0 0\n"
    )
    machine = Machine(root=root)
    assert machine.file_system(Path("/data/kv/worker")) == "tmpfs"
    assert machine.file_system(Path("/data/kvs")) == "ext4"
    assert machine.file_system(Path("/")) == "overlay"


def test_meminfo_without_the_line_is_an_error(root: Path):
    (root / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(ValueError, match="no MemTotal"):
        Machine(root=root).memory_bytes()


def test_render_nodes_in_order(root: Path):
    assert Machine(root=root).render_nodes() == []
    (root / "dev/dri").mkdir(parents=True)
    for name in ("renderD129", "card0", "renderD128"):
        (root / "dev/dri" / name).touch()
    assert [node.name for node in Machine(root=root).render_nodes()] == ["renderD128", "renderD129"]


def test_libraries_are_really_loaded():
    assert Machine().loads("libc.so.6")
    assert not Machine().loads("libno_such_thing.so.1")


def test_this_pytorch_can_be_asked():
    import torch

    assert TorchFacts.probe().version == torch.__version__


def test_this_machine_has_memory_and_file_systems():
    assert 0 < Machine().available_bytes() <= Machine().memory_bytes()
    assert Machine().file_system(Path("/proc/self")) == "proc"
