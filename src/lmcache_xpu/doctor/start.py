"""What `serve` looks at before it becomes vLLM: the checks that take milliseconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lmcache_xpu import versions
from lmcache_xpu.doctor import gpu, memory, software, storage
from lmcache_xpu.doctor.check import Check
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.machine import Machine, TorchFacts
from lmcache_xpu.launch.preflight import preflight
from lmcache_xpu.launch.settings import Settings

logger = logging.getLogger("lmcache_xpu")


def check_start(settings: Settings, machine: Machine | None = None) -> None:
    """Refuse what will not run on this machine, and log what will not run well.

    Args:
        settings: with the device that vLLM is built for.
        machine: this one, unless given.

    Raises:
        SettingsError: a check failed.
    """
    machine = machine or Machine()
    preflight(settings, machine.environ, machine)
    for check in _quick_checks(settings, machine):
        if check.outcome == "fail":
            raise SettingsError(
                f"{check.name}: {check.found}",
                "a machine that `lmcache-xpu doctor` passes",
                check.advice,
            )
        if check.outcome == "warn":
            logger.warning(
                "lmcache-xpu: %s: %s. %s (docs: troubleshooting#start-warning)",
                check.name,
                check.found,
                check.advice,
            )


def _quick_checks(settings: Settings, machine: Machine) -> Iterator[Check]:
    """Yield the doctor's checks that neither import PyTorch nor ask a server nor write much."""
    if settings.device == "xpu":
        yield gpu.check_nodes(machine)
        yield gpu.check_affinity(machine, settings)
    elif settings.device == "cpu":
        yield software.check_compiler(machine, settings)
    if not settings.offload:
        return
    yield memory.check_memory(machine, settings)
    if settings.devices > 1:
        yield memory.check_shared_memory(machine, settings)
    if settings.device == "xpu":
        torch = TorchFacts(versions.installed().torch or "")  # the cards would need its import
        yield memory.check_pinned(machine, settings, torch)
    yield storage.check_disk_room(machine, settings)
    yield software.check_hash_seed(machine, settings)
