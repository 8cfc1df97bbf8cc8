"""The one place that knows how LMCache and vLLM are patched.

LMCache has no plug-in point for connectors: its `CreateGPUConnector` is a fixed list of
devices. `install` wraps that function, two names beside it and vLLM's worker, when the modules that
hold them are imported (so that a process which never imports LMCache does not do so for this).
Without an engine being built by our vLLM connector, or one that has it, every wrapper passes
straight through.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import garbage
from lmcache_xpu.kv_connector.failed_loads import beginning_anew

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts
    from lmcache_xpu.gpu_connector.in_flight import InFlight

STANDARD = "lmcache_xpu.gpu_connector.standard.VLLMPagedMemXPUConnectorV2"
LAYERWISE = "lmcache_xpu.gpu_connector.layerwise.VLLMPagedMemLayerwiseXPUConnector"
DEVICES_VARIABLE = "LMCACHE_XPU_DEVICES"
SERVED = ("xpu", "cpu")

_building: ContextVar[EngineFacts | None] = ContextVar("lmcache_xpu_engine", default=None)


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that is replaced when its module is imported.

    Args:
        module: where the attribute is.
        attribute: its name; with a dot, of a class.
        replace: makes the replacement from the original.
        cause: why it has to be.
        optional: some versions do without it.
    """

    module: str
    attribute: str
    replace: Callable[[Any], Any]
    cause: str
    optional: bool = False

    def __call__(self, module: ModuleType) -> None:
        """Replace the attribute; does nothing when it is replaced already."""
        if self.needed(module) and not self.in_place(module):
            owner, _, name = self.attribute.rpartition(".")
            holder = getattr(module, owner) if owner else module
            replacement = self.replace(getattr(holder, name))
            replacement.__lmcache_xpu__ = True
            setattr(holder, name, replacement)

    def needed(self, module: ModuleType) -> bool:
        """Whether this version has the attribute, or should have."""
        owner, _, name = self.attribute.rpartition(".")
        return not self.optional or hasattr(getattr(module, owner) if owner else module, name)

    def in_place(self, module: ModuleType) -> bool:
        """Whether the attribute is a replacement made here."""
        return "__lmcache_xpu__" in vars(operator.attrgetter(self.attribute)(module))


def _create_connector(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        facts = _building.get()
        if facts is None:
            return original(config, metadata, engine, layout_hints=layout_hints)
        # The engine's real content: with inline scales or unequal key and value sizes it is not
        # what LMCache derives from the model's heads.
        layers, planes, chunk_size, _, _ = metadata.kv_shape
        metadata.kv_shape = (layers, planes, chunk_size, facts.heads, facts.head_size)
        metadata.model_name += facts.namespace  # the part of every key that we may extend
        connector = _resolve(LAYERWISE if config.use_layerwise else STANDARD).from_lmcache(
            config,
            metadata,
            device=facts.device_type,
            layout_hints=layout_hints,
            opaque_blocks=facts.opaque_blocks,
        )
        if not config.use_layerwise and planes > 1 and not facts.opaque_blocks:
            metadata.model_name += ".layers"  # bytes in another order than LMCache's format says
        if config.use_layerwise and (size := connector.groups[0][1]) > 1:
            # To LMCache a group of layers is a layer with as many times the heads.
            count, heads = len(connector.groups), facts.heads * size
            metadata.kv_shape = (count, planes, chunk_size, heads, facts.head_size)
            metadata.model_name += f".{size}layers"
        return connector

    return create


def publish_when_complete(manager: Any, overlap: InFlight) -> None:
    """Let LMCache's storage manager take over stored chunks only when they are complete.

    LMCache publishes as soon as the connector returns; its tiers would read what is being written.
    """
    put = manager.batched_put

    @functools.wraps(put)
    def batched_put(keys: Any, memory_objs: Any, *args: Any, **kwargs: Any) -> None:
        overlap.publish(memory_objs, functools.partial(put, keys, memory_objs, *args, **kwargs))

    manager.batched_put = batched_put


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _layout_hints(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hints(*args: Any) -> Any:
        facts = _building.get()
        return original(*args) if facts is None else {"kv_layout": facts.kv_layout}

    return hints


def _local_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def local(vllm_config: Any) -> Any:
        try:
            return original(vllm_config)
        except IndexError:
            if _building.get() is None:
                raise
            parallel = vllm_config.parallel_config
            return parallel.rank, parallel.world_size  # vLLM numbers this engine's devices from 0

    return local


def _begin_step(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.distributed import kv_transfer

    @functools.wraps(original)
    def execute_model(worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if kv_transfer.has_kv_transfer_group():
                begin = getattr(kv_transfer.get_kv_transfer_group(), "begin_step", None)
                if begin is not None and scheduler_output.kv_connector_metadata is not None:
                    begin(scheduler_output.kv_connector_metadata)
            return original(worker, scheduler_output, *args, **kwargs)
        finally:
            garbage.allow()

    return execute_model


def _change_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.distributed import kv_transfer

    @functools.wraps(original)
    def change(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if kv_transfer.has_kv_transfer_group():
            group = kv_transfer.get_kv_transfer_group()
            # Another connector may hold ours among others.
            for connector in (group, *getattr(group, "_connectors", ())):
                if hasattr(connector, "change_weights"):
                    connector.change_weights()
        return original(worker, *args, **kwargs)

    return change


# What a worker of vLLM 0.32 offers that leaves it with other weights, or may.
WEIGHT_CHANGES = (
    "load_model",
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "sleep",
    "wake_up",
    "discard",
)

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


PATCHES = (
    Patch(
        "lmcache.v1.gpu_connector",
        "CreateGPUConnector",
        _create_connector,
        "knows no cpu, and on xpu a connector that can't read vLLM's fused KV cache",
    ),
    Patch(
        "lmcache.v1.gpu_connector.xpu_connectors",
        "VLLMPagedMemXPUConnectorV2",
        lambda _: _resolve(STANDARD),
        "so that the name means one class, however it is reached",
    ),
    Patch(
        "lmcache.v1.gpu_connector.xpu_connectors",
        "VLLMPagedMemLayerwiseXPUConnector",
        lambda _: _resolve(LAYERWISE),
        "the same, and LMCache checks layerwise connectors against a list of class names",
    ),
    Patch(
        "lmcache.integration.vllm.utils",
        "vllm_layout_hints",
        _layout_hints,
        "raises for layouts that LMCache's own connectors can't read, and ours can",
    ),
    Patch(
        "lmcache.integration.vllm.utils",
        "calculate_local_rank_and_world_size",
        _local_rank,
        "raises in all but the first engine of data parallelism on CPU, where each has a list of "
        "devices of its own; our connectors don't use the number",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker",  # every device's worker is made from it
        "Worker.execute_model",
        _begin_step,
        "tells a connector of a step only when it has prepared it, 8 ms after it could load",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._handle_invalid_blocks",
        beginning_anew,
        "after a load that failed, gives wrong tokens with the runner that XPU uses",
    ),
    Patch(
        "vllm.triton_utils.dispatcher",
        "_rebind_kernels",
        _without_unreadable,
        "on CPU a second engine of a process looks through all modules, and fails on LMCache's",
        optional=True,
    ),
    *(
        Patch(
            "vllm.v1.worker.gpu_worker",
            f"Worker.{name}",
            _change_weights,
            "tells no connector that the weights change; cached KV would outlive them",
            optional=True,
        )
        for name in WEIGHT_CHANGES
    ),
)


_installed = False


def install() -> None:
    """Put the patches in place, now or when their modules are imported. May be called again.

    Does not look at versions: callers ask `versions.allowed` or `versions.check` first.
    """
    global _installed
    if not _installed:
        _installed = True
        for patch in PATCHES:
            wrapt.register_post_import_hook(patch, patch.module)


def served_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Device types that our connector serves; the others keep LMCache's own.

    Raises:
        SettingsError: the variable names a device that PyTorch does not know.
    """
    if not (given := environment.get(DEVICES_VARIABLE, "").strip()):
        return SERVED
    devices = tuple(name.strip() for name in given.split(","))
    for name in devices:
        try:
            torch.device(name)
        except RuntimeError:
            raise SettingsError(
                f"{DEVICES_VARIABLE}={given}", "device types, such as 'xpu,cpu'"
            ) from None
    return devices


@contextmanager
def building(facts: EngineFacts) -> Iterator[None]:
    """While this lasts, LMCache builds its engine for this vLLM engine with our connector."""
    token = _building.set(facts)
    try:
        yield
    finally:
        _building.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `lmcache-xpu status` shows.

    Args:
        lmcache_version, vllm_version, torch_version: installed, None where missing.
        tested: LMCache and vLLM are among the tested versions.
        devices: device type -> the classes that serve it, standard and layerwise.
        patches: dotted attribute -> whether our replacement is in place.
    """

    lmcache_version: str | None
    vllm_version: str | None
    torch_version: str | None
    tested: bool
    devices: dict[str, tuple[str, str]]
    patches: dict[str, bool]


def status() -> Status:
    """Install the patches in this process, import what they patch, and look."""
    found = versions.installed()
    patches = {}
    if found.lmcache is not None and versions.allowed(found):
        install()
        for patch in PATCHES:
            module = importlib.import_module(patch.module)
            name = f"{patch.module}.{patch.attribute}"
            if patch.needed(module):
                patches[name] = patch.in_place(module)
    return Status(
        lmcache_version=found.lmcache,
        vllm_version=found.vllm,
        torch_version=found.torch,
        tested=found.tested,
        devices=dict.fromkeys(served_devices(), (STANDARD, LAYERWISE)),
        patches=patches,
    )
