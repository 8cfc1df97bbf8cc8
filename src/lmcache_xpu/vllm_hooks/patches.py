"""The attributes of vLLM and LMCache that are replaced.

Each replacement passes to the original what does not concern a connector of this package. It is put
in place when the module that holds the attribute is imported, so no process imports one for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import wrapt

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.vllm_hooks.scheduler import beginning_anew

CONNECTOR_MODULE = "lmcache_xpu.vllm_connector"
STOCK_NAME, OUR_NAME = "LMCacheConnectorV1", "LMCacheXPUConnector"
SERVER_NAME = "LMCacheXPUServerConnector"  # a MultiConnector asks for its class by this alone
STANDARD = "lmcache_xpu.connector.connector.LMCacheXPUServerConnector"
LAYERWISE = "lmcache_xpu.stock.connector.LMCacheXPUConnector"

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
STOCK_ENTRY = f"{FACTORY}.KVConnectorFactory._registry[{STOCK_NAME}]"
DEVICES_VARIABLE = "LMCACHE_XPU_DEVICES"
STOCK_VARIABLE = "LMCACHE_XPU_STOCK"
SERVED = ("xpu", "cpu")


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that is replaced when its module is imported."""

    module: str
    attribute: str  # its name; with a dot, of a class
    replace: Callable[[Any], Any]  # makes the replacement from the original
    optional: bool = False  # some versions do without it

    @property
    def name(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.attribute}"

    def __call__(self, module: ModuleType) -> None:
        """Replace the attribute; does nothing when it is replaced already."""
        if self.needed(module) and not self.in_place(module):
            holder, name = self._holder(module)
            replacement: Any = self.replace(getattr(holder, name))
            replacement.__lmcache_xpu__ = True
            setattr(holder, name, replacement)

    def needed(self, module: ModuleType) -> bool:
        """Whether this version has the attribute, or should have."""
        return not self.optional or hasattr(*self._holder(module))

    def absent(self) -> bool:
        """Whether this version lacks the module, and need not have it."""
        return self.optional and importlib.util.find_spec(self.module) is None

    def in_place(self, module: ModuleType) -> bool:
        """Whether the attribute is a replacement made here."""
        return "__lmcache_xpu__" in vars(inspect.getattr_static(*self._holder(module)))

    def _holder(self, module: ModuleType) -> tuple[Any, str]:
        owner, _, name = self.attribute.rpartition(".")
        return operator.attrgetter(owner)(module) if owner else module, name


def _hooking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `WorkerWrapperBase.__getattr__`.

    vLLM's executors reach all methods of a worker but four through it. So a worker is hooked before
    its first change of weights, also where vLLM makes our connector after the worker.
    """

    @functools.wraps(original)
    def getattribute(wrapper: Any, name: str) -> Any:
        if (worker := vars(wrapper).get("worker")) is not None:
            from lmcache_xpu.vllm_hooks.worker_hooks import hook_worker

            hook_worker(worker)
        return original(wrapper, name)

    return getattribute


# Modules that hold an object which claims any attribute, `__dict__` included.
UNREADABLE = ("llvmlite.binding.ffi",)


def _without_unreadable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def look_through_modules(*args: Any, **kwargs: Any) -> Any:
        hidden = {name: sys.modules.pop(name) for name in UNREADABLE if name in sys.modules}
        try:
            return original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    return look_through_modules


def _with_served_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def labels(metadata: Any) -> Any:
        served = metadata.served_model_name or metadata.model_name
        return {**original(metadata), "model_name": served}

    return staticmethod(labels)


# vLLM's worker tells no connector that the weights change, which cached KV would outlive.
WORKER_HOOKS = Patch("vllm.v1.worker.worker_base", "WorkerWrapperBase.__getattr__", _hooking)
# On CPU an engine looks through all modules, and fails on LMCache's, if it is there before.
SECOND_ENGINES = Patch(
    "vllm.triton_utils.dispatcher", "_rebind_kernels", _without_unreadable, optional=True
)
PATCHES = (
    WORKER_HOOKS,
    # After a load that failed it gives wrong tokens with the runner that XPU uses. For engines that
    # were not started with `--scheduler-cls`.
    Patch("vllm.v1.core.sched.scheduler", "Scheduler._handle_invalid_blocks", beginning_anew),
    SECOND_ENGINES,
    # LMCache's metrics, which need no key, have the model's directory as a label.
    Patch("lmcache.observability", "PrometheusLogger._metadata_to_labels", _with_served_name),
)


def register(factory: ModuleType) -> bool:
    """Register our connectors with vLLM's `FACTORY`; whether one has LMCache's stock name, too."""
    registry = factory.KVConnectorFactory._registry
    for name in (OUR_NAME, SERVER_NAME):
        if name not in registry:
            factory.KVConnectorFactory.register_connector(name, CONNECTOR_MODULE, name)
    takes_stock_name = os.environ.get(STOCK_VARIABLE, "") in ("", "0")
    if takes_stock_name:  # vLLM has no public way to give a name a second meaning
        registry[STOCK_NAME] = registry[OUR_NAME]
    return takes_stock_name


def install(patches: Iterable[Patch] = PATCHES) -> None:
    """Put patches in place, now or when their modules are imported. May be called again.

    Does not look at versions: callers ask `versions.allowed` or `versions.check` first.
    """
    for patch in patches:
        wrapt.register_post_import_hook(patch, patch.module)


def served_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Device types that our connector serves; the others keep LMCache's own.

    Raises SettingsError for a device that PyTorch does not know.
    """
    if not (setting := environment.get(DEVICES_VARIABLE, "").strip()):
        return SERVED
    devices = tuple(name.strip() for name in setting.split(","))
    for name in devices:
        try:
            torch.device(name)
        except RuntimeError:
            raise SettingsError(
                f"{DEVICES_VARIABLE}={setting}", "device types, such as 'xpu,cpu'"
            ) from None
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `lmcache-xpu status` shows."""

    lmcache_version: str | None  # installed, None where missing
    vllm_version: str | None
    torch_version: str | None
    tested: bool  # LMCache and vLLM are among the tested versions
    devices: dict[str, tuple[str, str]]  # by type, the connectors: standard and layerwise
    patches: dict[str, bool]  # by dotted attribute, whether our replacement is in place


def status() -> Status:
    """Install the patches in this process, import what they replace, and look."""
    software = versions.installed()
    patches = {}
    if software.lmcache is not None and versions.allowed(software):
        install()
        for patch in PATCHES:
            if not patch.absent() and patch.needed(module := importlib.import_module(patch.module)):
                patches[patch.name] = patch.in_place(module)
        factory = importlib.import_module(FACTORY)
        if register(factory):
            registry = factory.KVConnectorFactory._registry
            patches[STOCK_ENTRY] = registry[STOCK_NAME] is registry[OUR_NAME]
    return Status(
        lmcache_version=software.lmcache,
        vllm_version=software.vllm,
        torch_version=software.torch,
        tested=software.tested,
        devices=dict.fromkeys(served_devices(), (STANDARD, LAYERWISE)),
        patches=patches,
    )
