"""Checks of host memory: what there is, and what of it may be pinned."""

from __future__ import annotations

from lmcache_xpu.doctor.check import Check, fail, ok, warn
from lmcache_xpu.machine import Machine, TorchFacts
from lmcache_xpu.settings import Settings

__all__ = ["check_memory", "check_pinned", "check_shared_memory"]

GIB = 2**30
# Reported upstream: one pinned allocation is capped near the card's memory, and those of
# PyTorch above this size end in a segmentation fault when they are used.
PINNED_GIB = 16
SPARE = 0.8  # of what is available, for the tier


def check_memory(machine: Machine, settings: Settings) -> Check:
    """Whether the CPU tier fits into memory, now and at all."""
    name = "host memory"
    tier = settings.cpu_gib * settings.tensor_parallel
    have, free = machine.memory_bytes() / GIB, machine.available_bytes() / GIB
    found = f"a CPU tier of {tier:g} GiB in all; {free:.1f} GiB available of {have:.1f}"
    if tier > min(have, free):
        return fail(
            name,
            found,
            "Lower cpu_gib, raise the container's memory limit, or stop what uses the memory.",
        )
    if tier > SPARE * min(have, free):
        return warn(name, found, "Little is left for the model's loading. Lower cpu_gib.")
    return ok(name, found)


def check_pinned(machine: Machine, settings: Settings, facts: TorchFacts) -> Check:
    """Whether the CPU tier, one pinned allocation per device, is within what is known to work."""
    name, tier = "pinned memory", settings.cpu_gib
    if facts.gpus and tier * GIB > (least := min(size for _, size in facts.gpus)):
        return fail(
            name,
            f"a CPU tier of {tier:g} GiB per device beside cards of {least / GIB:.0f} GiB",
            "Intel's driver caps one allocation near the card's memory. Lower cpu_gib, and give "
            "the disk tier more.",
        )
    limit = machine.memlock_bytes
    if 0 <= limit < tier * GIB:
        return warn(
            name,
            f"at most {limit / 2**20:.0f} MiB may be locked, the CPU tier is {tier:g} GiB",
            "Raise it (ulimits.memlock: -1 in compose, LimitMEMLOCK in systemd). Intel's driver "
            "does not ask for it today; RDMA does.",
        )
    if tier > PINNED_GIB:
        return warn(
            name,
            f"a CPU tier of {tier:g} GiB per device, in one pinned allocation",
            f"Above {PINNED_GIB} GiB crashes were reported for Intel GPUs; nothing of that was "
            "tried by us. It counts neither as the process's memory nor against the container's "
            "limit, so leave the machine room.",
        )
    return ok(name, f"{tier:g} GiB per device, not counted against the container's limit")


def check_shared_memory(machine: Machine, settings: Settings) -> Check:
    """Whether /dev/shm is large enough for workers to talk to each other."""
    import shutil

    name = "shared memory"
    size = shutil.disk_usage(machine.root / "dev/shm").total
    found = f"/dev/shm of {size / GIB:.2f} GiB"
    if settings.tensor_parallel > 1 and size < GIB:
        return warn(name, found, "Raise it: shm_size in compose, an emptyDir in memory in a pod.")
    return ok(name, found)
