"""Checks of what an image will move KV cache with: the connector, its kernels, pinned memory."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from lmcache_xpu.doctor.check import Check, fail, ok, skip, warn
from lmcache_xpu.versions import version_of

__all__ = ["check_connector", "check_kernels", "check_pinning"]

XPU_KERNELS = "vllm_xpu_kernels"
UNKNOWN = "of unknown version"


def check_connector(factory: ModuleType, names: tuple[str, ...]) -> Check:
    """Check which class vLLM's factory has under the names of connectors."""
    name = "connector"
    classes = {each: factory.KVConnectorFactory.get_connector_class_by_name(each) for each in names}
    text = ", ".join(f"{each} is {kind.__module__}" for each, kind in classes.items())
    others = [each for each in classes if not classes[each].__module__.startswith("lmcache_xpu.")]
    if names[0] in others:
        return fail(name, text, "Another package has that name; install this one alone.")
    if others:
        return warn(name, text, f"Name the connector {names[0]}, or unset LMCACHE_XPU_STOCK.")
    return ok(name, text)


def check_kernels(device: str) -> Check:
    """Check what gathers and scatters the KV cache on a device."""
    name = "kernels"
    if device == "cpu":
        return skip(name, "a CPU needs none: PyTorch copies")
    if importlib.util.find_spec("triton") is None:
        return warn(
            name,
            f"no Triton: PyTorch copies block by block on {device}",
            "Install the Triton that vLLM's image for this device has.",
        )
    return ok(
        name,
        f"Triton {version_of('triton-xpu', 'triton') or UNKNOWN}: gather and scatter on {device}",
    )


def check_pinning(device: str) -> Check:
    """Check how host memory that exists can be pinned on a device."""
    name = "pinning"
    if device != "xpu":
        return skip(name, f"{device} needs nothing of vLLM's for it")
    kernels = f"vllm-xpu-kernels {version_of(XPU_KERNELS) or UNKNOWN}"
    try:
        importlib.import_module(f"{XPU_KERNELS}._C")
    except Exception as error:  # any: a binary that does not fit raises what it likes
        return fail(
            name,
            f"{kernels}: {type(error).__name__}: {error}",
            "vLLM imports it at its start. It has to fit PyTorch and oneAPI: take vLLM's image.",
        )
    import torch

    if hasattr(torch.ops._C, "xpu_host_register"):
        return ok(name, f"{kernels} registers memory of any size with the driver")
    return warn(
        name,
        f"{kernels} can't register memory",
        "A CPU tier larger than one pinned allocation is copied through a ring of pinned memory.",
    )
