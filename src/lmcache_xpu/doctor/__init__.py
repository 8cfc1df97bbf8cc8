"""What has to be right before an engine can run here.

`lmcache-xpu doctor` makes all checks, and `serve` those that take milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lmcache_xpu import versions
from lmcache_xpu.doctor import gpu, memory, software, storage
from lmcache_xpu.doctor.check import Check, fail, ok, passes, skip
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.preflight import check_environment, check_port, preflight
from lmcache_xpu.launch.serve import built_for, resolve_device
from lmcache_xpu.launch.settings import Settings

__all__ = ["Check", "Machine", "check_start", "examine", "examine_build"]

logger = logging.getLogger("lmcache_xpu")

NO_MODEL = "(none)"  # stands for a model that was not named


def examine_build(machine: Machine) -> Iterator[Check]:
    """Yield the checks that need neither devices nor settings: while an image is built."""
    yield software.check_versions(versions.installed(), machine.environ)
    imports = software.check_imports(("torch", "vllm", "lmcache", "lmcache_xpu.vllm_connector"))
    yield imports
    if imports.outcome == "ok":
        yield software.check_packages(software.packages())
        from lmcache_xpu.vllm_hooks.patches import status

        yield software.check_patches(status())
        try:
            device = built_for()
        except SettingsError:  # no vLLM as a package, which the check of versions has said
            return
        yield software.check_kernels(device)
        yield software.check_pinning(device)


def examine(settings: Settings, machine: Machine) -> Iterator[Check]:
    """Yield all checks, in the order in which their subjects depend on each other."""
    yield from examine_build(machine)
    try:
        settings = resolve_device(settings)
    except SettingsError as error:
        yield fail("device", error.found, error.fix)
        return
    yield ok("device", f"{settings.device}, which vLLM is built for")
    yield from _gpu(settings, machine)
    if settings.offload:
        from lmcache_xpu.doctor import round_trip  # torch, which `serve` has no time for

        yield round_trip.check_transfer(settings.device)
        yield memory.check_memory(machine, settings)
        yield memory.check_shared_memory(machine, settings)
        yield storage.check_disk_tier(machine, settings)
        yield storage.check_shared_tier(settings)
    else:
        yield skip("tiers", "offload is off")
    state = "no variable contradicts the settings"
    yield passes("environment", state, check_environment, settings, machine.environ)
    if settings.model == NO_MODEL:
        yield skip("model", "none given: --model or LMCACHE_XPU_MODEL")
    else:
        yield software.check_served_model(settings)
    state = f"{settings.host}:{settings.port} is free"
    yield passes("port", state, check_port, settings.host, settings.port)


def _gpu(settings: Settings, machine: Machine) -> Iterator[Check]:
    if settings.device != "xpu":
        yield skip("Intel GPU", f"vLLM here is built for {settings.device}")
        if settings.device == "cpu":
            yield software.check_compiler(machine, settings)
        return
    yield gpu.check_nodes(machine)
    yield gpu.check_driver(machine)
    yield gpu.check_runtime(machine)
    facts = machine.torch()
    yield gpu.check_torch(facts, settings)
    yield from _cards(settings, machine)
    if settings.offload:
        yield memory.check_pinned(machine, settings, facts.gpus)


def _cards(settings: Settings, machine: Machine) -> Iterator[Check]:
    if settings.devices > 1:
        yield gpu.check_handles(machine)
    if settings.offload:
        yield gpu.check_copy_engine(machine)


def check_start(settings: Settings, machine: Machine | None = None) -> None:
    """Refuse what will not run on this machine (SettingsError), and log what will not run well."""
    machine = machine or Machine()
    preflight(settings, machine.environ)
    for check in _quick_checks(settings, machine):
        if check.outcome == "fail":
            raise SettingsError(
                f"{check.name}: {check.found}",
                check.expected or "a machine that `lmcache-xpu doctor` passes",
                check.advice,
            )
        if check.outcome == "warn":
            logger.warning(
                "lmcache-xpu: %s: %s. %s (docs: troubleshooting#start-warning)",
                *(check.name, check.found, check.advice),
            )


def _quick_checks(settings: Settings, machine: Machine) -> Iterator[Check]:
    """Yield the doctor's checks that neither import PyTorch nor ask a server nor write much."""
    if settings.device == "xpu":
        yield gpu.check_nodes(machine)
        yield from _cards(settings, machine)
    elif settings.device == "cpu":
        yield software.check_compiler(machine, settings)
    if not settings.offload:
        return
    yield memory.check_memory(machine, settings)
    if settings.devices > 1 or settings.is_server:
        yield memory.check_shared_memory(machine, settings)
    if settings.device == "xpu":
        yield memory.check_pinned(machine, settings)  # of any card: to see them takes PyTorch
    yield storage.check_disk_room(machine, settings)
