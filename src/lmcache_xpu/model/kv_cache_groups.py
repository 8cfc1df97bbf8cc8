"""vLLM's KV cache groups: which layers share blocks, and which blocks a hit needs.

Blocks are numbered within a group. All layers of a dense model are one group. Layers that attend to
a window are another, and so are those that keep a state: vLLM frees what they need no more, and
block 0 stands for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

NULL_BLOCK = 0  # vLLM's: it holds nothing
# Up to so many tokens of a prompt all windows are kept, and behind them one for as many.
WINDOW_TOKENS = 8192

# Layers that keep all of a request's tokens.
WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
_STRETCH, _STATE = "ChunkedLocalAttentionSpec", "MambaSpec"
_WINDOW = ("SlidingWindowSpec", _STRETCH)
_KEPT_STATES = ("align", "all")  # mamba_cache_mode: vLLM keeps a state at the end of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers whose blocks have the same numbers."""

    number: int  # as vLLM counts groups
    layers: tuple[str, ...]  # their names
    block_tokens: int
    # Tokens at the end of a hit that the server keeps for the layers, and names; None for all.
    window: int | None = None
    recurrent: bool = False  # each block holds a state, not keys and values

    def window_chunks(self, chunk_tokens: int) -> int:
        """Chunks at the end of a hit that the layers need; 0 for all of them."""
        return 0 if self.window is None else max(1, math.ceil(self.window / chunk_tokens))

    def is_storable(self, blocks: list[int], chunk_tokens: int) -> bool:
        """Whether a chunk's blocks hold all that a hit may need of it: a window of its end."""
        tokens = chunk_tokens if self.window is None else min(chunk_tokens, self.window)
        return NULL_BLOCK not in blocks[-math.ceil(tokens / self.block_tokens) :]


def cache_groups(kv_cache_config: KVCacheConfig) -> list[CacheGroup]:
    """Return the groups of an engine whose blocks are stored.

    Raises LayoutError for layers whose blocks can't be restored from a prefix.
    """
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if not vllm.is_transferred(group):
            continue
        windows = {_window(spec) for spec in layer_specs(group)}
        if len(windows) != 1:
            raise LayoutError(f"a KV cache group with windows of {windows} tokens", "one window")
        window, recurrent = windows.pop()
        groups.append(
            CacheGroup(
                number=number,
                layers=tuple(group.layer_names),
                block_tokens=group.kv_cache_spec.block_size,
                window=window,
                recurrent=recurrent,
            )
        )
    if len(groups) == 1:  # LMCache's server takes no windows of one: it keeps and names all chunks
        if groups[0].recurrent:
            raise LayoutError(
                "states in all layers",
                "attention in some",
                "Serve this model without KV-cache offload (--no-offload).",
            )
        groups = [dataclasses.replace(groups[0], window=None)]
    return groups


def block_tokens(kv_cache_config: KVCacheConfig) -> list[int]:
    """Return the tokens of a block of each group; 0 for one whose blocks no prefix has."""
    return [
        group.kv_cache_spec.block_size
        if all(getattr(spec, "prefix_cacheable", True) for spec in layer_specs(group))
        else 0
        for group in kv_cache_config.kv_cache_groups
    ]


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Return the spec of each of a group's layers, or the one that they share."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    return list(spec.kv_cache_specs.values()) if uniform else [spec]


def is_recurrent(spec: KVCacheSpec) -> bool:
    """Whether blocks hold a state each, not keys and values."""
    return type(spec).__name__ == _STATE


def check_states(spec: KVCacheSpec) -> None:
    """Raise `LayoutError` for layers that keep one state for several tokens."""
    if (tokens := vllm.tokens_per_state(spec)) != 1:
        raise LayoutError(f"{tokens} tokens per state", "one state per token")


def _window(spec: KVCacheSpec) -> tuple[int | None, bool]:
    """Return the tokens at the end of a hit that a layer needs, and whether it keeps a state."""
    kind = type(spec).__name__
    if is_recurrent(spec):
        if (mode := getattr(spec, "mamba_cache_mode", "none")) not in _KEPT_STATES:
            raise LayoutError(
                f"states that vLLM does not keep (mamba_cache_mode={mode})",
                f"one of {', '.join(_KEPT_STATES)}",
                "Set --mamba-cache-mode align, with vLLM's prefix caching on.",
            )
        return spec.block_size, True
    if kind not in (*WHOLE, *_WINDOW):
        raise LayoutError(
            f"a KV cache group of kind {kind}",
            f"groups of {', '.join((*WHOLE, *_WINDOW, _STATE))}",
            "Serve this model without KV-cache offload.",
        )
    check_states(spec)
    window: int | None = None
    if kind == _STRETCH:  # which may end with the hit
        window = getattr(spec, "attention_chunk_size", None)
    elif kind in _WINDOW and (window := getattr(spec, "sliding_window", None)) is not None:
        # A drafter of several layers computes some tokens before the window's once more.
        window = max(window, window - 1 + getattr(spec, "extra_retained_tokens", 0))
    return window, False
