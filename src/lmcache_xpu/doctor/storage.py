"""Checks of the disk tier and the shared tier."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from lmcache_xpu.doctor.check import Check, ok, passes, skip, warn
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.preflight import check_directory
from lmcache_xpu.launch.settings import Settings

GIB = 2**30
PROBE_BYTES = 256 * 2**20
SLOW_BYTES_S = 200e6  # below a SATA disk; recomputing is often faster then
TIMEOUT_S = 3.0
_EVICTION = "maxmemory-policy allkeys-lru"
_FORGOTTEN = {"overlay": "the container's own layer, gone with it", "tmpfs": "memory"}


def check_disk_tier(machine: Machine, settings: Settings) -> Check:
    """Check space, durability and write speed of the disk tier's directory."""
    room = check_disk_room(machine, settings)
    if settings.disk_path is None or room.outcome != "ok":
        return room
    speed = _write_speed(settings.disk_path)
    state = f"{room.found}, written at {speed / 1e6:.0f} MB/s"
    if speed < SLOW_BYTES_S:
        advice = "Use a local SSD: what is written slower than it is made is lost."
        return warn(room.name, state, advice)
    return ok(room.name, state)


def check_disk_room(machine: Machine, settings: Settings) -> Check:
    """Check space and durability of the disk tier's directory."""
    name, path = "disk tier", settings.disk_path
    if path is None or settings.disk_gib is None:
        return skip(name, "disk_path is not set")
    if (writable := passes(name, "", check_directory, path, "disk_path")).outcome == "fail":
        return writable
    kind = machine.file_system(path.resolve())
    needed_gib = settings.disk_gib * settings.devices
    room_gib = shutil.disk_usage(path).free / GIB
    if room_gib < needed_gib:  # else there is no need to look at every file
        room_gib += _used_bytes(path) / GIB
    state = f"{path} ({kind}): {room_gib:.0f} GiB to be had"
    if kind in _FORGOTTEN:
        advice = "Mount a volume or a local disk there."
        return warn(name, f"{path} is on {_FORGOTTEN[kind]}", advice)
    if room_gib < needed_gib:
        advice = "Lower disk_gib: when the disk is full, new chunks are dropped."
        return warn(name, f"{state}; disk_gib x devices is {needed_gib:g}", advice)
    return ok(name, state)


def check_shared_tier(settings: Settings) -> Check:
    """Check that the Valkey or Redis server answers, and makes room when it is full."""
    name = "shared tier"
    if settings.remote_url is None:
        return skip(name, "remote_url is not set")
    import redis

    memory: dict[str, Any] = {}
    password = settings.remote_password
    client = redis.Redis.from_url(
        settings.remote_url,
        password=None if password is None else password.get_secret_value(),
        socket_connect_timeout=TIMEOUT_S,
        socket_timeout=TIMEOUT_S,
    )
    try:
        with client:
            client.ping()
            # Not CONFIG GET, which users of a managed server may not call.
            with contextlib.suppress(redis.ResponseError):
                memory = client.info("memory")
    except (redis.RedisError, OSError) as error:
        return warn(
            name,
            f"{settings.remote_url}: {error}",
            "Engines run without it. Start the server, and check remote_url and remote_password.",
        )
    limit, policy = memory.get("maxmemory"), memory.get("maxmemory_policy")
    state = f"{settings.remote_url} answers"
    if limit is None or policy is None:
        return ok(name, f"{state}; its maxmemory can't be read")
    if not limit:
        advice = f"It grows until its machine has no memory: set maxmemory and {_EVICTION}."
        return warn(name, f"{state}, no maxmemory, {policy}", advice)
    state += f", maxmemory {limit / GIB:.2f} GiB, {policy}"
    if not policy.startswith("allkeys-"):
        advice = "It drops none of the chunks, and takes no new ones when it is full: set"
        return warn(name, state, f"{advice} {_EVICTION}.")
    return ok(name, state)


def _used_bytes(path: Path) -> int:
    used = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # an engine that ends may remove some
            used += file.stat().st_size if file.is_file() else 0
    return used


def _write_speed(path: os.PathLike[str]) -> float:
    """Measure bytes per second to the disk itself, with a file that is removed again."""
    block = os.urandom(2**20)  # some disks compress
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        begin = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - begin)
