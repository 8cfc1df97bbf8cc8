"""Each check of `lmcache-xpu doctor`, on a planted machine where this one can't show it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checks import said
from support.servers import PASSWORD, Server, needs_server

from lmcache_xpu import doctor
from lmcache_xpu.doctor import gpu, memory, software, storage
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector.patches import Status
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.machine import Machine, TorchFacts
from lmcache_xpu.launch.preflight import preflight
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.transfer import pool_memory
from lmcache_xpu.versions import Versions

GIB = 2**30
B60 = TorchFacts("2.14.0+xpu", (("Intel Arc Pro B60", 24 * GIB),))


def load(**values):
    return Settings.load({"model": "org/model", **values})


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
        given = {
            "root": root,
            "environ": {},
            "may_open": lambda _: True,
            "loads": lambda _: True,
            "torch": lambda: B60,
            "memlock_bytes": -1,
        }
        return Machine(**given | changes)

    return make


# Device nodes


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


def test_serve_stops_for_the_same_reasons(machine, root):
    settings = load(device="xpu", port=65431)
    with pytest.raises(SettingsError, match="RENDER_GID"):
        preflight(settings, {}, machine(may_open=lambda _: False))
    shutil.rmtree(root / "dev/dri")
    with pytest.raises(SettingsError, match=r"no renderD\*"):
        preflight(settings, {}, machine())


# Driver, runtime, PyTorch


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


def test_libraries_are_really_loaded():
    assert Machine().loads("libc.so.6")
    assert not Machine().loads("libno_such_thing.so.1")


def test_what_pytorch_sees():
    assert said(gpu.check_torch(B60, load()), "ok", "Arc Pro B60 (24 GiB)")
    assert said(gpu.check_torch(TorchFacts("2.13.0+cpu"), load()), "fail", "2.13.0+cpu", "+xpu")
    two = load(tensor_parallel=2)
    assert said(gpu.check_torch(B60, two), "fail", "tensor_parallel=2:", "ZE_AFFINITY_MASK")
    four = load(tensor_parallel=2, data_parallel=2)
    assert said(gpu.check_torch(B60, four), "fail", "tensor_parallel=2 x data_parallel=2")


def test_this_pytorch_can_be_asked():
    import torch

    assert TorchFacts.probe().version == torch.__version__


@pytest.mark.parametrize(
    ("mask", "parallel", "outcome"),
    [("", 4, "ok"), ("0", 1, "ok"), ("0,1", 2, "ok"), ("1", 2, "fail"), ("0,", 2, "fail")],
)
def test_the_affinity_mask_leaves_enough(machine, mask, parallel, outcome):
    chosen = machine(environ={"ZE_AFFINITY_MASK": mask})
    for name in ("tensor_parallel", "data_parallel"):
        check = gpu.check_affinity(chosen, load(**{name: parallel}))
        assert check.outcome == outcome


# Memory


@pytest.mark.parametrize(
    ("cpu_gib", "parallel", "limit", "outcome"),
    [
        (20, 1, None, "ok"),
        (20, 2, None, "warn"),  # 40 of 48 available
        (20, 3, None, "fail"),  # 60 of 48 available
        (20, 1, "max\n", "ok"),
        (20, 1, f"{16 * GIB}\n", "fail"),
        (4, 1, f"{16 * GIB}\n", "ok"),
    ],
)
@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_cpu_tier_against_memory_and_limit(
    machine, root, cpu_gib, parallel, limit, outcome, file
):
    if limit:
        (root / "sys/fs/cgroup" / file).parent.mkdir(exist_ok=True)
        (root / "sys/fs/cgroup" / file).write_text(limit)
    for name in ("tensor_parallel", "data_parallel"):
        check = memory.check_memory(machine(), load(cpu_gib=cpu_gib, **{name: parallel}))
        assert check.outcome == outcome, check


def test_the_limit_of_a_container_stops_serve_too(machine, root):
    (root / "sys/fs/cgroup/memory.max").write_text(str(4 * GIB))
    with pytest.raises(SettingsError, match=r"less than the 4\.0 GiB"):
        preflight(load(cpu_gib=5, port=65431), {}, machine())


@pytest.mark.parametrize(
    ("cpu_gib", "card_gib", "way"),
    [
        (8, 24, "8 GiB per device, one pinned allocation each"),
        (16, 24, "one pinned allocation each"),
        (17, 24, "one pinned allocation may be 16 GiB"),
        (64, 24, "ordinary memory that the driver registers"),
        (15, 16, "one pinned allocation may be 14.4 GiB"),
        (0.5, 24, "PyTorch would round a pinned one up"),
    ],
)
def test_the_way_of_the_cpu_tier_is_the_rule_of_the_engine(machine, cpu_gib, card_gib, way):
    settings = load(cpu_gib=cpu_gib, device="xpu")
    environ = engine_variables(settings, {})
    size, most = int(cpu_gib * GIB), pool_memory.limit(card_gib * GIB)
    assert pool_memory.fits(size, most, environ) == ("pinned allocation each" in way)
    facts = TorchFacts("2.14.0+xpu", (("large", 48 * GIB), ("small", card_gib * GIB)))
    assert said(memory.check_pinned(machine(), settings, facts), "ok", way)


def test_pinned_memory_against_limits_and_settings_of_others(machine):
    settings = load(cpu_gib=8, device="xpu")
    locked = machine(memlock_bytes=2**26)
    assert said(memory.check_pinned(locked, settings, B60), "warn", "64 MiB", "memlock")
    risky = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1024"}
    check = memory.check_pinned(
        machine(environ=risky), settings, TorchFacts("2.13.0+xpu", B60.gpus)
    )
    assert said(check, "warn", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
    harmless = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:512,max_split_size_mb:64"}
    assert memory.check_pinned(machine(environ=harmless), settings, B60).outcome == "ok"


def test_shared_memory_matters_with_several_workers(machine, monkeypatch):
    usage = shutil.disk_usage("/")._replace(total=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert memory.check_shared_memory(machine(), load()).outcome == "ok"
    check = memory.check_shared_memory(machine(), load(tensor_parallel=2))
    assert said(check, "warn", "0.06 GiB", "shm_size")


# Disk and server


def test_a_disk_is_measured_and_left_as_it_was(machine, root, monkeypatch):
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 0)
    check = storage.check_disk_tier(machine(), load(disk_path=root / "data", disk_gib=1))
    assert said(check, "ok", "ext4", "MB/s")
    assert not any((root / "data").iterdir())
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 1e15)
    check = storage.check_disk_tier(machine(), load(disk_path=root / "data", disk_gib=1))
    assert said(check, "warn", "SSD")


def test_a_disk_that_is_too_small(machine, root):
    settings = load(disk_path=root / "data", disk_gib=1e6, tensor_parallel=2)
    assert said(storage.check_disk_tier(machine(), settings), "warn", "2e+06", "Lower disk_gib")


def test_a_disk_tier_that_would_be_forgotten(machine, root):
    settings = load(disk_path=root / "elsewhere", disk_gib=1)
    assert said(storage.check_disk_tier(machine(), settings), "warn", "container's own layer")


def test_a_disk_path_that_can_not_be_written(machine, root):
    (root / "data/file").touch()
    settings = load(disk_path=root / "data/file", disk_gib=1)
    assert said(storage.check_disk_tier(machine(), settings), "fail", "can't be written")


def test_tiers_that_are_off(machine):
    assert storage.check_disk_tier(machine(), load()).outcome == "skip"
    assert storage.check_shared_tier(load()).outcome == "skip"


def test_a_shared_tier_that_is_away():
    check = storage.check_shared_tier(load(remote_url="redis://127.0.0.1:1"))
    assert said(check, "fail", "refused", "remote_password")


@pytest.fixture
def server():
    server = Server()
    server.start()
    yield server
    server.stop()
    server.client.close()


@needs_server
def test_what_a_shared_tier_does_when_it_is_full(server):
    def check():
        return storage.check_shared_tier(load(remote_url=server.url, remote_password=PASSWORD))

    def policy(name):
        server.client.config_set("maxmemory-policy", name)

    assert said(check(), "warn", "no maxmemory, noeviction", "maxmemory-policy allkeys-lru")
    server.client.config_set("maxmemory", 2 * GIB)
    for drops_none in ("noeviction", "volatile-lru", "volatile-ttl"):
        policy(drops_none)
        assert said(check(), "warn", f"2.00 GiB, {drops_none}", "set maxmemory-policy allkeys-lru")
    for name in ("allkeys-lru", "allkeys-lfu", "allkeys-random"):
        policy(name)
        assert said(check(), "ok", f"answers, maxmemory 2.00 GiB, {name}")
    server.client.acl_setuser("default", enabled=True, commands=["-config"])
    assert said(check(), "ok", "2.00 GiB, allkeys-random")  # as where a provider keeps it
    server.client.acl_setuser("default", enabled=True, commands=["-info"])
    assert said(check(), "ok", "answers; its maxmemory can't be read")


@needs_server
def test_a_shared_tier_with_another_password(server):
    check = storage.check_shared_tier(load(remote_url=server.url, remote_password="wrong"))
    assert said(check, "fail", "password", "remote_password")


# Software


def test_versions_against_the_tested_ones():
    tested = Versions(lmcache="0.5.6", vllm="0.32.0", torch="2.14.0")
    other = Versions(lmcache="0.4.0", vllm="0.32.0", torch=None)
    assert said(software.check_versions(tested, {}), "ok", "0.32.0")
    assert said(software.check_versions(other, {}), "fail", "0.4.0", "lmcache 0.5.6")
    allowed = {"LMCACHE_XPU_ALLOW_UNTESTED": "1"}
    assert said(software.check_versions(other, allowed), "warn", "0.4.0")


def test_a_package_that_can_not_be_imported():
    assert said(software.check_imports(("json", "no_such_package")), "fail", "no_such_package")


def test_a_patch_that_is_missing():
    given = {"lmcache_version": "", "vllm_version": "", "torch_version": "", "tested": True}
    status = Status(**given, devices={"xpu": ("A", "B")}, patches={"a.b": True, "c.d": False})
    assert said(software.check_patches(status), "fail", "c.d", "Another package")
    status = Status(**given, devices={"xpu": ("A", "B")}, patches={})
    assert software.check_patches(status).outcome == "fail"


def test_the_compiler_that_a_cpu_engine_needs(machine):
    none = machine(environ={"PATH": "/nowhere"})
    assert said(software.check_compiler(none, load()), "fail", "no g++", "enforce_eager")
    assert software.check_compiler(none, load(enforce_eager=True)).outcome == "skip"
    here = machine(environ={"PATH": os.environ["PATH"], "CXX": "sh"})
    assert said(software.check_compiler(here, load()), "ok", "sh")


def test_a_hash_seed_of_someone_else(machine):
    assert software.check_hash_seed(machine(), load()).outcome == "ok"
    other = machine(environ={"PYTHONHASHSEED": "123"})
    assert said(software.check_hash_seed(other, load()), "warn", "123")


def test_variables_that_contradict(machine):
    rival = machine(environ={"LMCACHE_CHUNK_SIZE": "64"})
    assert said(software.check_rivals(rival, load()), "fail", "Unset LMCACHE_CHUNK_SIZE")


def test_a_model_that_is_not_there():
    assert said(software.check_served_model(load(model="/no/such")), "fail", "config.json")


def test_a_model_with_states(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    check = software.check_served_model(load(model=str(tmp_path)))
    assert said(check, "fail", "linear_attention", "--no-offload")
    assert software.check_served_model(load(model=str(tmp_path), offload=False)).outcome == "ok"


# The command


def run(*args, **environ):
    program = [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", "doctor", *args]
    env = {**os.environ, **environ}
    return subprocess.run(program, env=env, capture_output=True, text=True)


def test_the_command_says_what_is_wrong_in_both_languages(tmp_path):
    bad = {"LMCACHE_XPU_CPU_GIB": "100000", "LMCACHE_XPU_MODEL": str(tmp_path)}
    done = run("--json", **bad)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    failed = {c["name"]: c["advice"] for c in found["checks"] if c["outcome"] == "fail"}
    assert set(failed) == {"host memory", "model"}
    done = run(**bad, COLUMNS="200")
    assert done.returncode == 1
    assert "Lower cpu_gib" in done.stdout


def test_the_build_needs_neither_device_nor_settings():
    # Nor the directory that an engine makes: in a container its variable is always set.
    never_made = {"PROMETHEUS_MULTIPROC_DIR": "/no/such"}
    done = run("--build", "--json", LMCACHE_XPU_CPU_GIB="100000", **never_made)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), found
    assert [c["name"] for c in found["checks"]] == ["versions", "imports", "packages", "patches"]


def test_no_check_of_the_gpu_is_left_out(machine, monkeypatch):
    monkeypatch.setattr(doctor, "resolve_device", lambda s: s.model_copy(update={"device": "xpu"}))
    monkeypatch.setattr(doctor, "examine_build", lambda _: iter(()))
    names = [check.name for check in doctor.examine(load(port=65431), machine())]
    assert {"device nodes", "kernel driver", "oneAPI runtime", "PyTorch's devices"} <= set(names)
    assert {"GPU selection", "pinned memory"} <= set(names)


def test_this_machine_has_memory_and_file_systems():
    assert 0 < Machine().available_bytes() <= Machine().memory_bytes()
    assert Machine().file_system(Path("/proc/self")) == "proc"
