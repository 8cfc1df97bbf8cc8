"""Checks of the installed software, of what an image moves KV cache with, and of variables."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from lmcache_xpu import versions
from lmcache_xpu.doctor.check import Check, fail, ok, passes, skip, warn
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.model_support import check_layers, check_reachable
from lmcache_xpu.launch.preflight import check_model
from lmcache_xpu.launch.settings import Settings

if TYPE_CHECKING:
    from lmcache_xpu.vllm_hooks.patches import Status

XPU_KERNELS = "vllm_xpu_kernels"
UNKNOWN = "of unknown version"


def check_versions(installed: versions.Versions, environ: Mapping[str, str]) -> Check:
    """Check LMCache and vLLM against the tested matrix."""
    name = "versions"
    vllm = installed.changed or installed.vllm
    text = f"LMCache {installed.lmcache}, vLLM {vllm}, PyTorch {installed.torch}"
    tested = " and ".join(f"{key} {versions.tested_versions(key)}" for key in versions.TESTED)
    variable = versions.UNTESTED_VARIABLE
    if installed.tested and installed.changed:
        release = installed.vllm
        advice = f"That is {release} with changes, and tested is {release} as released."
        return warn(name, text, advice)
    if installed.tested:
        return ok(name, text)
    if versions.allowed(installed, environ):
        return warn(name, text, f"Tested are {tested}; {variable} lets them pass.")
    return fail(name, text, f"Install {tested}, or set {variable}=1 at your own risk.")


def check_imports(modules: tuple[str, ...]) -> Check:
    """Check that the packages can be imported at all."""
    name = "imports"
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # any: a broken binary raises what it likes
            advice = "Its packages don't fit each other; reinstall them as the Dockerfile does."
            return fail(name, f"{module}: {type(error).__name__}: {error}", advice)
    return ok(name, ", ".join(modules))


def check_compiler(machine: Machine, settings: Settings) -> Check:
    """Check that there is the C++ compiler that PyTorch compiles the model with on CPU."""
    name, compiler = "compiler", machine.environ.get("CXX", "g++")
    if settings.enforce_eager:
        return skip(name, "enforce_eager is on: nothing is compiled")
    if shutil.which(compiler, path=machine.environ.get("PATH")) is None:
        advice = "Install g++ and Python's headers, or set enforce_eager."
        return fail(name, f"no {compiler}", advice)
    return ok(name, compiler)


def check_patches(status: Status) -> Check:
    """Check that our connector stands in LMCache's place."""
    name = "patches"
    missing = [patch for patch, in_place in status.patches.items() if not in_place]
    if missing or not status.patches:
        state = f"not in place: {', '.join(missing) or 'none, the versions are not allowed'}"
        advice = "Another package patches LMCache too, or see the check of versions."
        return fail(name, state, advice)
    return ok(name, f"{len(status.patches)} in place, for {', '.join(status.devices)}")


def check_connector(factory: ModuleType, names: tuple[str, ...]) -> Check:
    """Check which class vLLM's factory has under the names of connectors."""
    name = "connector"
    classes = {each: factory.KVConnectorFactory.get_connector_class_by_name(each) for each in names}
    others = [each for each in classes if not classes[each].__module__.startswith("lmcache_xpu.")]
    text = ", ".join(f"{each} is of {classes[each].__module__}" for each in others)
    if names[0] in others:
        return fail(name, text, "Another package has that name; install this one alone.")
    if others:
        return warn(name, text, f"Name the connector {names[0]}, or unset LMCACHE_XPU_STOCK.")
    return ok(name, f"this package's, by the names {' and '.join(names)}")


def check_kernels(device: str) -> Check:
    """Check what gathers and scatters the KV cache on a device."""
    name = "kernels"
    if device == "cpu":
        return skip(name, "a CPU needs none: PyTorch copies")
    if importlib.util.find_spec("triton") is None:
        advice = "Install the Triton that vLLM's image for this device has."
        return warn(name, f"no Triton: PyTorch copies block by block on {device}", advice)
    version = versions.version_of("triton-xpu", "triton") or UNKNOWN
    return ok(name, f"Triton {version}: gather and scatter on {device}")


def check_pinning(device: str) -> Check:
    """Check how host memory that exists can be pinned on a device."""
    name = "pinning"
    if device != "xpu":
        return skip(name, f"{device} needs nothing of vLLM's for it")
    kernels = f"vllm-xpu-kernels {versions.version_of(XPU_KERNELS) or UNKNOWN}"
    try:
        importlib.import_module(f"{XPU_KERNELS}._C")
    except Exception as error:  # any: a binary that does not fit raises what it likes
        advice = (
            "vLLM imports it at its start. It has to fit PyTorch and oneAPI: take vLLM's image."
        )
        return fail(name, f"{kernels}: {type(error).__name__}: {error}", advice)
    import torch

    if hasattr(torch.ops._C, "xpu_host_register"):
        return ok(name, f"{kernels} registers memory of any size with the driver")
    advice = (
        "A CPU tier larger than one pinned allocation is copied through a ring of pinned memory."
    )
    return warn(name, f"{kernels} can't register memory", advice)


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
    return ok(name, f"PYTHONHASHSEED={fixed}, set by serve")


def check_served_model(settings: Settings) -> Check:
    """Check that the model is there, or its hub, and that its layers can be offloaded."""
    try:
        check_model(settings.model)
    except SettingsError as error:
        return fail("model", f"{error.found}: no config.json there", error.fix)

    def check_offload() -> None:
        check_reachable(settings.model)
        check_layers(settings)

    return passes("model", settings.model, check_offload)
