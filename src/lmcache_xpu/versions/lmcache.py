"""Where the installed LMCache keeps its in-process mode.

LMCache 0.5.7 moved that mode into the package `lmcache.inprocess`, module by module, and left no
aliases. What this package uses of it is imported from here. A module is imported when a name of it
is asked for: some need vLLM, others take seconds.
"""

# ruff: noqa: F401 (imported for others)

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # types, as the version has them that pyproject.toml pins
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.gpu_connector.xpu_connectors import VLLMPagedMemLayerwiseXPUConnector

MODULES = {
    "GPUConnectorInterface": "v1.gpu_connector.gpu_connectors",
    "LMCacheConnectorV1Impl": "integration.vllm.vllm_v1_adapter",
    "VLLMPagedMemLayerwiseXPUConnector": "v1.gpu_connector.xpu_connectors",
}


@cache
def in_process_package() -> str:
    """Return the package that holds the in-process mode: that of 0.5.7, or LMCache itself."""
    return "lmcache.inprocess" if find_spec("lmcache.inprocess") else "lmcache"


def in_process_module(name: str) -> ModuleType:
    """Import a module of the in-process mode, by its name before 0.5.7: `v1.cache_engine`."""
    return import_module(f"{in_process_package()}.{name}")


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(in_process_module(MODULES[name]), name)
