"""What the installed LMCache has for workers of its server, and which of them can serve what.

A name is imported when it is asked for: some need vLLM, others take seconds.
"""

# ruff: noqa: F401 (imported for others)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # types, as the version has them that pyproject.toml pins
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import (
        LMCacheMPConnectorMetadata,
        LMCacheMPRequestMetadata,
        LMCacheMPRequestState,
    )
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        HeartbeatThread,
        LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
    )
    from lmcache.v1.multiprocess.custom_types import (
        IPCCacheServerKey,
        RegisterEngineDrivenContextPayload,
    )
    from lmcache.v1.multiprocess.futures import MessagingFuture
    from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import TransferContext

MODULES = {
    "GroupLayout": "v1.multiprocess.custom_types",
    "HeartbeatThread": "integration.vllm.vllm_multi_process_adapter",
    "IPCCacheServerKey": "v1.multiprocess.custom_types",
    "LMCacheMPConnector": "integration.vllm.lmcache_mp_connector",
    "LMCacheMPConnectorMetadata": "integration.vllm.lmcache_mp_metadata",
    "LMCacheMPRequestMetadata": "integration.vllm.lmcache_mp_metadata",
    "LMCacheMPRequestState": "integration.vllm.lmcache_mp_metadata",
    "LMCacheMPSchedulerAdapter": "integration.vllm.vllm_multi_process_adapter",
    "LMCacheMPWorkerAdapter": "integration.vllm.vllm_multi_process_adapter",
    "MessagingFuture": "v1.multiprocess.futures",
    "RegisterEngineDrivenContextPayload": "v1.multiprocess.custom_types",
    "ServerModuleCallRequest": "v1.multiprocess.protocols.server_module",
    "TransferContext": "v1.multiprocess.transfer_context.worker_transfer",
}
NEWER_BASE = "DiscoverableModule"


def tokens_of(op: LoadStoreOp) -> Any:
    """Return the tokens of a load or a store, as keys are made of them; packed in newer ones."""
    return op.token_bytes if hasattr(op, "token_bytes") else op.token_ids


def __getattr__(name: str) -> Any:
    if name == "ServerModuleBase":  # of the server's modules; older ones need none
        return getattr(import_module("lmcache.v1.multiprocess.engine_module"), NEWER_BASE, object)
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lmcache.{MODULES[name]}"), name)
