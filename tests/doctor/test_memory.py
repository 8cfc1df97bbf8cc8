"""Checks of memory, on a planted machine."""

from __future__ import annotations

import shutil

import pytest
from support.checks import B60, GIB, load, said
from support.listening import listening

from lmcache_xpu.doctor import memory
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.transfer import pool_memory


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


def test_the_memory_of_a_server_that_runs_is_not_asked_for_again(machine, root):
    (root / "sys/fs/cgroup/memory.max").write_text(str(4 * GIB))
    assert memory.check_memory(machine(), load(cpu_gib=5, cache="server")).outcome == "fail"
    with listening() as url:
        settings = load(cpu_gib=5, cache="server", server_url=url)
        assert memory.check_memory(machine(), settings).outcome == "ok"
    check = memory.check_memory(machine(), settings)
    assert (check.outcome, check.name) == ("fail", "LMCache's server")
    assert url in str(check)


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
    gpus = (("large", 48 * GIB), ("small", card_gib * GIB))
    assert said(memory.check_pinned(machine(), settings, gpus), "ok", way)


def test_pinned_memory_against_limits_and_settings_of_others(machine):
    settings = load(cpu_gib=8, device="xpu")
    theirs = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:512,max_split_size_mb:64"}
    assert memory.check_pinned(machine(environ=theirs), settings, B60.gpus).outcome == "ok"


def test_shared_memory_matters_with_several_workers(machine, monkeypatch):
    usage = shutil.disk_usage("/")._replace(total=64 * 2**20, free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert memory.check_shared_memory(machine(), load()).outcome == "ok"
    check = memory.check_shared_memory(machine(), load(data_parallel=2))
    assert said(check, "warn", "0.06 GiB", "shm_size")


@pytest.mark.parametrize("values", [{"cache": "server"}, {"tensor_parallel": 2, "cpu_gib": 2.5}])
def test_shared_memory_has_to_hold_what_a_server_lends(machine, monkeypatch, values):
    """Of all devices, and only of a server that starts with the engine."""

    def free(gib):
        usage = shutil.disk_usage("/")._replace(total=8 * GIB, free=int(gib * GIB))
        return lambda _: usage

    settings = load(**{"cpu_gib": 5, **values})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", free(4.9))
        check = memory.check_shared_memory(machine(), settings)
        assert said(check, "fail", "4.90 GiB free", "Lower cpu_gib")
        running = load(cpu_gib=5, cache="server", server_url="ipc:///run/kv/server.sock")
        assert memory.check_shared_memory(machine(), running).outcome == "ok"
        assert memory.check_shared_memory(machine(), load(cpu_gib=5)).outcome == "ok"
    monkeypatch.setattr(shutil, "disk_usage", free(5))
    assert memory.check_shared_memory(machine(), settings).outcome == "ok"
