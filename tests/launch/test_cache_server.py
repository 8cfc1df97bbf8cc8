"""LMCache's server beside an engine. A small program stands for it, but in one test."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.scripts import environment

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import cache_server
from lmcache_xpu.launch.cache_server import check_room, server_command, server_environment
from lmcache_xpu.launch.engine_arguments import (
    SCHEDULER,
    engine_variables,
    kv_transfer_config,
    vllm_arguments,
)
from lmcache_xpu.launch.serve import describe
from lmcache_xpu.launch.settings import SERVER_LACKS, Settings

# Writes its process id to a line of a file, and waits.
SERVER = "import os, sys, time; open(sys.argv[2], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
PARENT = """
import subprocess, sys, time
from lmcache_xpu.launch import cache_server
subprocess.Popen(
    [sys.executable, "-m", "lmcache_xpu.launch.cache_server", sys.executable, "-c", *sys.argv[1:]],
    preexec_fn=cache_server.end_with_parent,
)
time.sleep(600)
"""


SOCKET = Path("/run/kv/server.sock")


def settings(**values):
    return Settings.load({"model": "m", "device": "cpu", "cache": "server", **values})


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(seen, seconds=20.0):
    end = time.monotonic() + seconds
    while not (result := seen()) and time.monotonic() < end:
        time.sleep(0.05)
    return result


@pytest.fixture
def kept(tmp_path):
    """A process that started a server, and the file of the server's process ids."""
    pids = tmp_path / "pids"
    socket = tmp_path / "server" / "server.sock"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SERVER, socket, pids], env=environment()
    )
    yield parent, lambda: [int(line) for line in pids.read_text().split()] if pids.exists() else []
    parent.kill()
    parent.wait()


def test_a_server_that_ends_is_started_again_and_ends_with_the_engine(kept):
    parent, pids = kept
    [first] = wait_for(pids)
    os.kill(first, signal.SIGKILL)
    _, second = wait_for(lambda: len(pids()) == 2 and pids())
    assert is_running(second)
    parent.kill()  # without a chance to end anything
    assert wait_for(lambda: not is_running(second))
    assert pids() == [first, second]


def test_what_a_server_left_in_shared_memory_is_taken_away(tmp_path):
    name = f"lmcache-xpu-test-{os.getpid()}-left"
    left = Path("/dev/shm") / f"{cache_server.POOL_PREFIX}{name}"
    left.write_bytes(bytes(100))
    command = [sys.executable, "-c", "", tmp_path / name / "server.sock"]
    keeper = subprocess.Popen(
        [sys.executable, "-m", "lmcache_xpu.launch.cache_server", *command], env=environment()
    )
    try:
        assert wait_for(lambda: not left.exists())
    finally:
        keeper.terminate()
        keeper.wait()
        left.unlink(missing_ok=True)


def test_what_a_killed_server_left_is_taken_away_by_the_next_and_others_stay(tmp_path, monkeypatch):
    """In a pod /dev/shm outlives the engine's container, and the names are drawn at random."""
    monkeypatch.setattr(cache_server, "SHARED_MEMORY", tmp_path)

    def kept(name: str) -> int:
        lock = cache_server.lock_pool(name)
        (tmp_path / f"{cache_server.POOL_PREFIX}{name}").write_bytes(bytes(100))
        return lock

    os.close(kept("lmcache-xpu-dead"))
    alive = kept("lmcache-xpu-alive")
    (tmp_path / f"{cache_server.POOL_PREFIX}lmcache-xpu-server").write_bytes(bytes(100))
    cache_server.clear_pools()
    left = {path.name.removeprefix(cache_server.POOL_PREFIX) for path in tmp_path.iterdir()}
    assert left == {"lmcache-xpu-alive", "lmcache-xpu-alive.lock", "lmcache-xpu-server"}
    os.close(alive)
    cache_server.clear_pools()
    assert [path.name for path in tmp_path.iterdir()] == ["lmcache_l1_pool_lmcache-xpu-server"]


def test_the_server_gets_the_sizes_of_all_devices():
    command = server_command(settings(cpu_gib=3, tensor_parallel=2, chunk_tokens=512), SOCKET)
    options = dict(itertools.pairwise(command))
    assert options["--l1-size-gb"] == "6.0"
    assert options["--chunk-size"] == "512"
    assert str(SOCKET) in command
    assert "--no-l1-use-lazy" in command
    assert options["--shm-name"]


def test_the_engine_gets_the_connector_and_nothing_of_the_in_process_mode():
    server = {"server_url": "tcp://127.0.0.1:5555", "server_timeout_s": 0.5}
    asked = settings(**server, staging_mib=64, loads="async")
    transfer = kv_transfer_config(asked)
    assert transfer["kv_connector"] == "LMCacheXPUServerConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {
        "lmcache.mp.server_urls": "tcp://127.0.0.1:5555",
        "lmcache.mp.mq_timeout": 0.5,
        "lmcache.mp.heartbeat_interval": 0.5,
        "lmcache.mp.save_decode_cache": False,
        "xpu.server_timeout_s": 0.5,
        "xpu.loads": "async",
        "xpu.staging_mib": 64,
    }
    assert engine_variables(asked)["LMCACHE_XPU_STOCK"] == "1"  # no patch of vLLM
    arguments = vllm_arguments(asked)
    assert arguments[arguments.index("--scheduler-cls") + 1] == SCHEDULER
    for others in (settings(cache="auto", layerwise=True), settings(offload=False)):
        assert "--scheduler-cls" not in vllm_arguments(others)


@pytest.mark.parametrize("cache", ["auto", "server"])
def test_on_several_ranks_no_load_is_inside_a_step(cache):
    with pytest.raises(SettingsError, match="loads=step with an engine of 2 devices"):
        settings(loads="step", tensor_parallel=2, cache=cache)
    assert settings(tensor_parallel=2, cache=cache).loads == "auto"


@pytest.mark.parametrize(
    ("values", "is_server"),
    [
        ({}, False),
        ({"data_parallel": 2}, False),  # engines of one device each
        ({"tensor_parallel": 2}, True),
        ({"pipeline_parallel": 2}, True),
        ({"tensor_parallel": 2, "layerwise": True}, False),
        ({"cache": "server"}, True),
        ({"cache": "in-process"}, False),
    ],
)
def test_an_engine_of_several_devices_has_a_server_unless_told(values, is_server):
    loaded = Settings.load({"model": "m", "device": "xpu", **values})
    assert loaded.is_server is is_server
    assert ("server_program " in describe(loaded)) is is_server
    options = kv_transfer_config(loaded)["kv_connector_extra_config"]
    assert ("lmcache.mp.server_urls" in options) is is_server
    assert ("xpu.cache" in options) is (not is_server and not loaded.layerwise)


@pytest.mark.parametrize("values", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_several_devices_have_no_cache_in_the_engines_process_but_layer_by_layer(values):
    values |= {"model": "m", "device": "xpu", "cache": "in-process"}
    with pytest.raises(SettingsError, match="cache=in-process with an engine of 2 devices"):
        Settings.load(values)
    if "tensor_parallel" in values:
        assert not Settings.load({**values, "layerwise": True}).is_server


def test_a_dry_run_shows_the_server_that_would_be_started():
    assert "server_program " in describe(settings())
    assert "server_program " not in describe(settings(server_url="ipc:///run/kv/server.sock"))


@pytest.mark.parametrize("name", SERVER_LACKS)
def test_what_the_server_lacks_is_refused(name):
    values = {
        "layerwise": True,
        "kv_events": "tcp://*:5557",
        "tier_dtype": "fp8",
    }
    with pytest.raises(SettingsError, match=f"{name}=.*cache=server, which has no.*in-process"):
        settings(**{name: values[name]})


def test_what_the_server_lacks_is_refused_where_several_devices_need_one():
    """Without the advice to use a cache that such an engine can't have."""
    with pytest.raises(SettingsError, match=r"kv_events=.* with cache=auto") as refusal:
        settings(cache="auto", tensor_parallel=2, kv_events="tcp://*:5557")
    assert "in-process" not in refusal.value.fix


def test_a_disk_is_that_of_the_server_which_is_started():
    disk = {"disk_path": "/d", "disk_gib": 3, "tensor_parallel": 2}
    command = server_command(settings(**disk), SOCKET)
    option = json.loads(command[command.index("--l2-adapter") + 1])
    assert option["adapter_params"] == {"disk.path": "/d", "disk.gib": 6}  # of both devices
    assert command[command.index("--l2-prefetch-policy") + 1] == "retain"
    assert "--l2-adapter" not in server_command(settings(), SOCKET)
    with pytest.raises(SettingsError, match="a server that runs has tiers of its own"):
        settings(server_url="tcp://127.0.0.1:5555", **disk)


def test_the_shared_tier_is_asked_after_the_disk_and_its_password_is_no_argument():
    remote = {"remote_url": "redis://cache:6379", "remote_password": "s3cret"}
    asked = settings(disk_path="/d", disk_gib=3, **remote)
    command = server_command(asked, SOCKET)
    tiers = [json.loads(v) for n, v in itertools.pairwise(command) if n == "--l2-adapter"]
    assert [tier["class_name"] for tier in tiers] == ["DiskL2Adapter", "SharedL2Adapter"]
    assert tiers[1]["adapter_params"] == {"shared.url": "redis://cache:6379"}
    alone = server_command(settings(**remote), SOCKET)
    assert alone[alone.index("--l2-prefetch-policy") + 1] == "retain"
    assert "s3cret" not in " ".join(command + alone)
    environ = {"LMCACHE_XPU_REMOTE_PASSWORD": "another"}
    kept = server_environment(environ, asked)
    assert kept["LMCACHE_XPU_REMOTE_PASSWORD"] == "s3cret"
    assert "LMCACHE_XPU_REMOTE_PASSWORD" not in server_environment(environ, settings())
    with pytest.raises(SettingsError, match="a server that runs has tiers of its own"):
        settings(server_url="tcp://127.0.0.1:5555", **remote)


def test_a_server_that_nobody_would_use_is_refused():
    with pytest.raises(SettingsError, match="expected cache=server"):
        Settings.load({"model": "m", "server_url": "tcp://127.0.0.1:5555"})


def test_too_little_shared_memory_is_refused(monkeypatch):
    usage = SimpleNamespace(free=2**30)
    monkeypatch.setattr(cache_server.shutil, "disk_usage", lambda _: usage)
    check_room(settings(cpu_gib=1))
    with pytest.raises(SettingsError, match="docker: --shm-size"):
        check_room(settings(cpu_gib=1, tensor_parallel=2))


@pytest.mark.engine
def test_a_real_server_is_up_when_the_engine_begins():
    script = """
import contextlib, io, json, os, urllib.request
from lmcache_xpu.launch.cache_server import POOL_PREFIX, start_server
from lmcache_xpu.launch.settings import Settings
values = {"model": "m", "device": "cpu", "cache": "server", "cpu_gib": 0.1}
shown = io.StringIO()
with contextlib.redirect_stdout(shown):
    url = start_server(Settings.load(values))
page = urllib.request.urlopen(shown.getvalue().split()[-1]).read().decode()
name = f"{POOL_PREFIX}{url.split('/')[-2]}"
shared = [n for n in os.listdir("/dev/shm") if n == name]
print(json.dumps({"shared": shared, "counts": "lmcache_mp_" in page}))
"""
    from support.scripts import run_script

    seen = run_script(script)
    assert len(seen["shared"]) == 1
    assert seen["counts"]
