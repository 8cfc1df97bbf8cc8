"""What sets an engine's chunks apart from those of every other engine in one directory.

vLLM's keys hold a hash of the tokens and the number of a KV cache group, and nothing of the model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_xpu import versions
from lmcache_xpu.model.model_fingerprint import fingerprint

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["engine_identity"]

_DIGITS = 24


def engine_identity(spec: OffloadingSpec, chunk_bytes: int, namespace: str) -> str:
    """Return 24 digits of a hash: equal for engines that may read each other's chunks.

    It covers what vLLM's tier `fs` has in the names of its files, the weights, the order of the
    bytes in a block, and their number. vLLM's CPU kernels pack blocks in an order that may change
    with every version, so on CPU vLLM's version counts as well.

    Args:
        spec: of vLLM's offloading.
        chunk_bytes: of one chunk, all ranks and padding included.
        namespace: of the user, for what a tier isn't told: `--hf-overrides`, for example.
    """
    # vLLM's own names: a field that a later version adds counts at once.
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.file_mapper import FileMapper

    device = current_platform.device_type
    files = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
    facts: dict[str, Any] = {
        **files.get_run_config(),
        "chunk_bytes": chunk_bytes,
        "device": device,
        "kv_cache_layout": getattr(spec.config, "kv_cache_layout", None),
        "namespace": namespace,
        "vllm": str(versions.installed().vllm) if device == "cpu" else None,
        "weights": _weights(spec.config.model.name),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _weights(model: str) -> str:
    """Return the fingerprint of a model's files, or of its commit where a hub has it."""
    if Path(model).exists():
        return fingerprint(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a repository's name: a file of one, for example
        config = None
    # .../snapshots/COMMIT/config.json
    commit = Path(config).parent.name if isinstance(config, str) else None
    return fingerprint(model, commit)
