"""Checks of the installed software, of what an image moves KV cache with, and of variables."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmcache_xpu import versions
from lmcache_xpu.doctor.check import Check, fail, ok, passes, skip, warn
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.model_support import check_layers, check_reachable
from lmcache_xpu.launch.preflight import check_model
from lmcache_xpu.launch.settings import Settings

if TYPE_CHECKING:
    from lmcache_xpu.vllm_hooks.patches import Status

XPU_KERNELS = "vllm_xpu_kernels"
UNKNOWN = "of unknown version"
# Packages that vLLM and LMCache both ask for. A plain `pip install` of LMCache takes them back to
# what LMCache's wheel asks for.
SHARED = (
    *("grpcio", "grpcio-status", "opentelemetry-api", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-prometheus", "opentelemetry-sdk", "prometheus-client", "protobuf"),
)


def check_versions(installed: versions.Versions, environ: Mapping[str, str]) -> Check:
    """Check LMCache and vLLM against the tested matrix."""
    name = "versions"
    vllm = installed.changed or installed.vllm
    parts = {"LMCache": installed.lmcache, "vLLM": vllm, "PyTorch": installed.torch}
    text = ", ".join(f"{part} {version or 'missing'}" for part, version in parts.items())
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
            advice = "Install vLLM for this device, then the rest: `python3 scripts/install.py`."
            return fail(name, f"{module}: {type(error).__name__}: {error}", advice)
    return ok(name, ", ".join(modules))


def packages() -> dict[str, metadata.Distribution]:
    """Return all installed packages by their canonical names (imports nothing)."""
    # The first on the path wins.
    return {canonicalize_name(each.name): each for each in reversed([*metadata.distributions()])}


def check_packages(packages: Mapping[str, metadata.Distribution]) -> Check:
    """Check that the packages that vLLM and LMCache share are as vLLM, and they, ask for.

    Fails where vLLM's own requirements are broken, and warns where those of another package are.
    """
    name = "packages"
    vllm = next((n for n in versions.BUILDS_OF_VLLM if n in packages), None)
    if vllm is None:
        return skip(name, "vLLM is not installed as a package here")
    shared = [package for package in SHARED if package in packages]
    broken = {each: [*_broken(packages[each], packages)] for each in (vllm, *shared)}
    if not any(broken.values()):
        return ok(name, ", ".join(f"{each} {packages[each].version}" for each in shared))
    text = "; ".join(
        f"{each} {packages[each].version} wants {requirement}, and here is {version}"
        for each, requirements in broken.items()
        for requirement, version in requirements
    )
    wanted = dict.fromkeys(f"'{wanted}'" for each in broken.values() for wanted, _ in each)
    advice = (
        f"pip install {' '.join(wanted)}. A plain `pip install` of LMCache takes vLLM's packages "
        "back; `python3 scripts/install.py` in a clone of lmcache-xpu leaves them."
    )
    return (fail if broken[vllm] else warn)(name, text, advice)


def _broken(
    package: metadata.Distribution, packages: Mapping[str, metadata.Distribution]
) -> Iterator[tuple[str, str]]:
    """Yield each requirement of a shared package that is broken, and the version that does it."""
    for requirement in map(Requirement, package.requires or ()):
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in SHARED and name in packages and applies:
            version = packages[name].version
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{name}{requirement.specifier}", version


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
        return fail(name, state, "Another package patches LMCache too, or see the versions.")
    return ok(name, f"{len(status.patches)} in place, for {', '.join(status.devices)}")


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


def check_served_model(settings: Settings) -> Check:
    """Check that the model is there, or its hub, and that its layers can be offloaded."""

    def check() -> None:
        check_model(settings.model)
        check_reachable(settings.model)
        check_layers(settings)

    return passes("model", settings.model, check)
