"""Checks of host memory: its size, and how much of it may be pinned."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from lmcache_xpu.doctor.check import Check, fail, ok, passes, warn
from lmcache_xpu.launch.cache_server import check_room
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.preflight import check_server
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.transfer import pool_memory

GIB = 2**30
SPARE = 0.2  # of the memory, besides the tier; more than SPARE_GIB is not needed
SPARE_GIB = 16


def check_memory(machine: Machine, settings: Settings) -> Check:
    """Check that the CPU tier fits into memory, now and at all."""
    name = "host memory"
    if (url := settings.server_url) is not None:
        server = passes("LMCache's server", url, check_server, url)
        state = f"the CPU tier is that of {url}, which has it already"
        return ok(name, state) if server.outcome == "ok" else server
    tier = settings.cpu_gib * settings.devices
    have, free = machine.memory_bytes() / GIB, machine.available_bytes() / GIB
    state = f"a CPU tier of {tier:g} GiB in all; {free:.1f} GiB available of {have:.1f}"
    room = min(have, free)
    if tier > room:
        advice = "Lower cpu_gib, raise the container's memory limit, or stop what uses the memory."
        return fail(name, state, advice)
    if room - tier < min(SPARE * room, SPARE_GIB):
        return warn(name, state, "Little is left for the model's loading. Lower cpu_gib.")
    return ok(name, state)


def check_pinned(
    machine: Machine, settings: Settings, gpus: Iterable[tuple[str, int]] = ()
) -> Check:
    """Say how devices of these names and bytes reach the CPU tier."""
    name, tier = "pinned memory", settings.cpu_gib
    environ = {**machine.environ, **engine_variables(settings, machine.environ)}
    most = pool_memory.limit(min((size for _, size in gpus), default=None))
    if pool_memory.fits(int(tier * GIB), most, environ):
        how = "one pinned allocation each, not counted against the container's limit"
    else:
        reason = (
            f"one pinned allocation may be {most / GIB:.3g} GiB"
            if tier * GIB > most
            else "PyTorch would round a pinned one up"
        )
        how = f"ordinary memory that the driver registers, counted against the limit: {reason}"
    return ok(name, f"{tier:g} GiB per device, {how}")


def check_shared_memory(machine: Machine, settings: Settings) -> Check:
    """Check that /dev/shm is large enough for a server that starts, and for workers to talk."""
    name, directory = "shared memory", machine.root / "dev/shm"
    size_gib = shutil.disk_usage(directory).total / GIB
    state = f"/dev/shm of {size_gib:.2f} GiB"
    if settings.is_server and settings.server_url is None:
        return passes(name, state, check_room, settings, directory)
    if settings.devices > 1 and size_gib < 1:
        return warn(name, state, "Raise it: shm_size in compose, an emptyDir in memory in a pod.")
    return ok(name, state)
