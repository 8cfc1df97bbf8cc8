"""What a connector must know of a vLLM engine, read once from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu import versions
from lmcache_xpu.errors import LayoutError, SettingsError
from lmcache_xpu.model.kv_cache_groups import WHOLE, check_states, layer_specs
from lmcache_xpu.model.layer_kinds import OTHER_WAYS, LayerKinds
from lmcache_xpu.model.model_fingerprint import fingerprint
from lmcache_xpu.model.model_settings import settings_mark
from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

# What vLLM may draft tokens with. The first keep no KV cache; the layers of the others are as the
# model's own, and come behind them.
_WITH_LAYERS = ("eagle", "eagle3", "mtp")
_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", *_WITH_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of an engine whose layers are alike."""

    device_type: str  # `xpu`, `cuda` or `cpu`
    kv_layout: str  # the memory order of the KV cache as vLLM names it
    opaque_blocks: bool  # blocks are packed in an order of the attention kernel's own
    heads: int  # on this worker
    head_size: int  # elements per head and plane (half of the content where that is fused)
    block_size: int  # tokens
    # What sets this cache's bytes apart from those of engines with the same model name, dtype and
    # world size: the weights, and how blocks are packed.
    namespace: str


def check_model(vllm_config: VllmConfig, *, layerwise: bool = False) -> None:
    """Refuse a model, or what drafts its tokens, before vLLM makes a KV cache for it.

    Raises SettingsError, which names the layers, or the method.
    """
    model, drafter = vllm_config.model_config, vllm_config.speculative_config
    if model.is_hybrid:
        config = model.hf_text_config
        kinds = ", ".join(LayerKinds.of_config(config).other) or "a kind that keeps a state"
        raise SettingsError(
            f"layers of {kinds} in a {config.model_type}",
            "attention in every layer",
            "Layer by layer LMCache can't restore them. " + OTHER_WAYS,
        )
    if drafter is None:
        return
    if drafter.method not in _DRAFTERS:
        raise SettingsError(
            f"speculative decoding with the method {drafter.method!r}",
            "ngram, eagle, eagle3 or mtp",
            "A drafter with a KV cache of its own kind can't be served with offload: use one of "
            "these, leave --speculative-config out, or serve with --no-offload.",
        )
    if layerwise and drafter.method in _WITH_LAYERS:
        raise SettingsError(
            f"speculative decoding with the method {drafter.method!r}, with use_layerwise",
            "a drafter without layers of its own, such as ngram",
            "Leave use_layerwise off: LMCache counts the layers of the model alone.",
        )


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Read the facts of an engine, once its KV cache layout is resolved.

    Raises LayoutError for a kind of KV cache that a prefix can't be restored into.
    """
    from vllm.platforms import current_platform

    spec = _only_spec(kv_cache_config)
    heads, content_bytes = vllm.kv_heads(spec), vllm.content_bytes(spec)
    mla = heads == 1 and type(spec).__name__ == "MLAAttentionSpec"
    content, rest = divmod(content_bytes, spec.dtype.itemsize)
    head_size, odd = divmod(content, 1 if mla else 2)
    if rest or odd:
        raise LayoutError(
            f"{content_bytes} bytes of {spec.dtype} per head and token",
            "a content that splits into two planes",
        )
    opaque = current_platform.device_type == "cpu" and not mla
    marks = [*_model(vllm_config), *(_packing(vllm_config, spec) if opaque else ())]
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        marks.append(cache_dtype)  # fp8 formats share LMCache's dtype uint8
    if not mla and head_size != spec.head_size:
        marks.append(f"c{content_bytes}")
    return EngineFacts(
        device_type=current_platform.device_type,
        kv_layout=vllm.kv_cache_layout(vllm_config),
        opaque_blocks=opaque,
        heads=heads,
        head_size=head_size,
        block_size=spec.block_size,
        namespace="+" + ".".join(marks),
    )


def check_chunks(facts: EngineFacts, *, chunk_size: int, save_unfull_chunk: bool) -> None:
    """Raise SettingsError for chunks that would cut an opaque block."""
    if not facts.opaque_blocks:
        return
    packs = f"vLLM's CPU attention packs the {facts.block_size} tokens of a block together"
    if chunk_size % facts.block_size:
        raise SettingsError(
            f"LMCache chunk_size {chunk_size} with blocks of {facts.block_size} tokens",
            f"a multiple of {facts.block_size}: {packs}",
            "Change chunk_size, or vLLM's --block-size.",
        )
    if save_unfull_chunk:
        raise SettingsError(
            "LMCache save_unfull_chunk true", f"false on CPU: {packs}", "Leave it unset."
        )


def _only_spec(kv_cache_config: KVCacheConfig) -> AttentionSpec:
    groups = [group for group in kv_cache_config.kv_cache_groups if vllm.is_transferred(group)]
    specs: list[AttentionSpec] = [spec for group in groups for spec in layer_specs(group)]
    for spec in specs:
        kind = type(spec).__name__
        if kind not in WHOLE:  # only these can be restored from a prefix
            raise LayoutError(
                f"a KV cache group of kind {kind}, which does not keep all of a prefix",
                f"groups of {' or '.join(WHOLE)}",
                "Serve this model without KV-cache offload.",
            )
        check_states(spec)
    shapes = {
        (vllm.kv_heads(spec), vllm.content_bytes(spec), spec.block_size, spec.dtype)
        for spec in specs
    }
    if len(groups) != 1 or len(shapes) != 1:
        raise LayoutError(
            f"{len(groups)} KV cache groups with {len(shapes)} shapes",
            "one group whose layers all have the same shape",
            "Models whose layers differ, or differ from their drafter's, are not supported; serve "
            "them without offload, or without the drafter.",
        )
    return specs[0]


def packing_marks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Return what sets the bytes of an engine's blocks apart, whatever its layers are.

    As the namespace of `engine_facts`, for a KV cache of which whole blocks are kept.
    """
    from vllm.platforms import current_platform

    marks = [
        *_model(vllm_config),
        current_platform.device_type,
        vllm.kv_cache_layout(vllm_config),
        _dtype(vllm_config),
        vllm_config.cache_config.cache_dtype,
    ]
    if current_platform.device_type == "cpu":
        for group in kv_cache_config.kv_cache_groups:
            for spec in layer_specs(group) if vllm.is_transferred(group) else ():
                if type(spec).__name__ != "MambaSpec":
                    marks += _packing(vllm_config, spec)
    return marks


def _model(vllm_config: VllmConfig) -> list[str]:
    """Return what sets a model's KV apart: its files, and the settings beside them."""
    model = vllm_config.model_config
    weights = f"w{fingerprint(model.model, getattr(model.hf_config, '_commit_hash', None))}"
    mark = settings_mark(vllm_config)
    return [weights, mark] if mark else [weights]


def _packing(vllm_config: VllmConfig, spec: AttentionSpec) -> list[str]:
    """Return what sets blocks apart that the CPU's attention packs in an order of its own."""
    # vLLM sets the instruction set on its layers only after the connector is made, by this call.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config
    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache.cache_dtype
    )
    layout, block = vllm.kv_cache_layout(vllm_config), f"b{spec.block_size}"
    # The packing is vLLM's own affair and may change with its version.
    version = f"vllm{versions.installed().vllm}"
    return ["cpu", isa, layout, block, _dtype(vllm_config), version]


def _dtype(vllm_config: VllmConfig) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")
