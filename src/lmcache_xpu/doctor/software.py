"""Checks of the installed software, and of what the environment makes of it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcache_xpu import versions
from lmcache_xpu.doctor.check import Check, fail, ok, skip, warn
from lmcache_xpu.errors import SettingsError, VersionError
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.model_support import check_layers, check_reachable
from lmcache_xpu.launch.preflight import check_environment, check_model, check_port
from lmcache_xpu.launch.settings import Settings

if TYPE_CHECKING:
    from lmcache_xpu.kv_connector.patches import Status

__all__ = [
    "check_compiler",
    "check_hash_seed",
    "check_imports",
    "check_patches",
    "check_rivals",
    "check_served_model",
    "check_server_port",
    "check_versions",
]


def check_versions(installed: versions.Versions, environ: Mapping[str, str]) -> Check:
    """Check LMCache and vLLM against the tested matrix."""
    name = "versions"
    vllm = installed.changed or installed.vllm
    text = f"LMCache {installed.lmcache}, vLLM {vllm}, PyTorch {installed.torch}"
    tested = " and ".join(f"{key} {versions.tested_versions(key)}" for key in versions.TESTED)
    if installed.tested and installed.changed:
        return warn(
            name,
            text,
            f"That is {installed.vllm} with changes, and tested is {installed.vllm} as released.",
        )
    if installed.tested:
        return ok(name, text)
    if versions.allowed(installed, environ):
        return warn(
            name, text, f"Tested are {tested}; {versions.UNTESTED_VARIABLE} lets them pass."
        )
    return fail(
        name, text, f"Install {tested}, or set {versions.UNTESTED_VARIABLE}=1 at your own risk."
    )


def check_imports(modules: tuple[str, ...]) -> Check:
    """Check that the packages can be imported at all."""
    name = "imports"
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # any: a broken binary raises what it likes
            return fail(
                name,
                f"{module}: {type(error).__name__}: {error}",
                "Its packages don't fit each other; reinstall them as the Dockerfile does.",
            )
    return ok(name, ", ".join(modules))


def check_compiler(machine: Machine, settings: Settings) -> Check:
    """Check that there is the C++ compiler that PyTorch compiles the model with on CPU."""
    name, compiler = "compiler", machine.environ.get("CXX", "g++")
    if settings.enforce_eager:
        return skip(name, "enforce_eager is on: nothing is compiled")
    if shutil.which(compiler, path=machine.environ.get("PATH")) is None:
        return fail(
            name, f"no {compiler}", "Install g++ and Python's headers, or set enforce_eager."
        )
    return ok(name, compiler)


def check_patches(status: Status) -> Check:
    """Check that our connector stands in LMCache's place."""
    name = "patches"
    missing = [patch for patch, in_place in status.patches.items() if not in_place]
    if missing or not status.patches:
        return fail(
            name,
            f"not in place: {', '.join(missing) or 'none, the versions are not allowed'}",
            "Another package patches LMCache too, or see the check of versions.",
        )
    return ok(name, f"{len(status.patches)} in place, for {', '.join(status.devices)}")


def check_hash_seed(machine: Machine, settings: Settings) -> Check:
    """Check that chunk keys are the same in every process."""
    name, seed = "hash seed", machine.environ.get("PYTHONHASHSEED")
    fixed = engine_variables(settings)["PYTHONHASHSEED"]
    if seed not in (None, fixed):
        return warn(
            name,
            f"PYTHONHASHSEED={seed}",
            f"`lmcache-xpu serve` sets {fixed}; engines started otherwise would find nothing "
            "that these stored. Unset it.",
        )
    return ok(name, f"{settings.hash_algorithm} with PYTHONHASHSEED={fixed}, set by serve")


def check_rivals(machine: Machine, settings: Settings) -> Check:
    """Check that no variable of vLLM and LMCache contradicts ours."""
    name = "environment"
    try:
        check_environment(settings, machine.environ)
    except SettingsError as error:
        return fail(name, error.found, error.fix)
    return ok(name, "no variable contradicts the settings")


def check_server_port(settings: Settings) -> Check:
    """Check that the server's port is free."""
    name = "port"
    try:
        check_port(settings.host, settings.port)
    except SettingsError as error:
        return fail(name, error.found, error.fix)
    return ok(name, f"{settings.host}:{settings.port} is free")


def check_served_model(settings: Settings) -> Check:
    """Check that the model is there, or its hub, and that its layers can be offloaded."""
    name = "model"
    try:
        check_model(settings.model)
    except SettingsError as error:
        return fail(name, f"{error.found}: no config.json there", error.fix)
    try:
        check_reachable(settings.model)
        check_layers(settings)
    except (SettingsError, VersionError) as error:
        return fail(name, error.found, error.fix)
    return ok(name, settings.model)
