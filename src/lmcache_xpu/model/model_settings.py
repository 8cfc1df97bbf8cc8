"""What a user sets beside a model's files, and what changes what the model computes from them.

The fingerprint of the files says nothing of it: `--hf-overrides` may change the rope scaling, and
`--quantization` the weights. docs/reference/what-names-a-chunk.md has every setting of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# By vLLM's configuration: fields that count where they have another value than vLLM's default.
NAMED: dict[str, tuple[str, ...]] = {
    "model_config": (
        *("hf_overrides", "hf_config_path", "code_revision", "quantization_config", "model_impl"),
        *("model_class_overrides", "disable_sliding_window", "config_format"),
    ),
    "multimodal_config": (
        *("language_model_only", "media_io_kwargs", "mm_processor_kwargs", "video_pruning_rate"),
        *("mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("interleave_mm_strings", "video_pruning_method"),
    ),
    "cache_config": (
        *("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "use_replayssm"),
        *("replayssm_buffer_len",),
    ),
    "lora_config": (
        *("lora_dtype", "target_modules", "enable_tower_connector_lora"),
        *("enable_moe_shared_loras",),
    ),
    "load_config": ("model_loader_extra_config",),
    "attention_config": ("indexer_kv_dtype",),
}
# Variables of vLLM that quantize what the checkpoint has not quantized so.
ENVIRONMENT = (
    *("VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG"),
    *("VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_XPU_INC_WNA16_BACKEND", "VLLM_MODEL_REDIRECT_PATH"),
)
_LLAMA4_LONG = 32768  # tokens; a longer `max_model_len` tunes the temperature of its attention
_DIGITS = 12


def settings_mark(vllm_config: VllmConfig) -> str:
    """Return what names these settings in a chunk's key; empty where all are vLLM's defaults.

    Raises SettingsError for KV scales that each engine computes from its own first requests.
    """
    model = vllm_config.model_config
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise SettingsError(
            "--calculate-kv-scales",
            "scales of the checkpoint, or none",
            "Each engine would read the KV cache of others with scales of its own. Leave it out, "
            "or serve with --no-offload.",
        )
    configs = {name: getattr(vllm_config, name, None) for name in NAMED}
    configs["multimodal_config"] = getattr(model, "multimodal_config", None)
    changed = {
        f"{name}.{field}": value
        for name, config in configs.items()
        for field in NAMED[name]
        if config is not None and (value := _changed(config, field)) is not None
    }
    # What the checkpoint is quantized by is in its files; this is done while it is loaded.
    is_quantized = _of_files(model, "quantization_config", "compression_config")
    method = getattr(model, "quantization", None)
    if method not in (None, "gguf") and not is_quantized:
        changed["quantization"] = method
    changed |= _by_length(model)
    # vLLM itself sets what the model's files say, or float32.
    usual = ("auto", "float32", *_of_files(model, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    if (dtype := getattr(vllm_config.cache_config, "mamba_ssm_cache_dtype", "auto")) not in usual:
        changed["mamba_ssm_cache_dtype"] = dtype
    load = getattr(vllm_config, "load_config", None)
    if getattr(load, "load_format", "auto") == "dummy":  # weights drawn by the seed
        changed["seed"] = model.seed
    changed |= {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    if not changed:
        return ""
    text = json.dumps(changed, sort_keys=True, default=_named)
    return "s" + hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _changed(config: Any, name: str) -> Any:
    """Return a field's value; None where it is the default, empty, or unknown to this vLLM."""
    field = getattr(config, "__dataclass_fields__", {}).get(name)
    if field is None:
        return None
    default = getattr(field.default, "default", field.default)  # of pydantic's field, or the value
    value = getattr(config, name)
    return value if value not in (default, None, "", {}, [], ()) else None


def _by_length(model: ModelConfig) -> dict[str, Any]:
    """Return what a model's longest prompt, and its way to generate, change of what is computed.

    Empty for what vLLM takes where nothing is set.
    """
    changed: dict[str, Any] = {}
    # Phi 3, for example: one of two sets of factors for all prompts, however long they are.
    for parameters in _of_files(model, "rope_parameters", "rope_scaling"):
        kinds = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
        for rope in kinds:
            original = rope.get("original_max_position_embeddings")
            if not original or rope.get("rope_type", rope.get("type")) != "longrope":
                continue
            usual = getattr(model.hf_config, "original_max_position_embeddings", None)
            by_default = usual is None or usual > original
            if (model.max_model_len > original) != by_default:
                changed["longrope"] = not by_default
    if any(str(kind).startswith("llama4") for kind in _of_files(model, "model_type")):
        # A length that vLLM fits to the memory (-1) shrinks when the model is made already.
        fitted = getattr(model, "original_max_model_len", None) == -1
        by_length = True if fitted or model.max_model_len > _LLAMA4_LONG else None
        overrides = getattr(model, "override_generation_config", None) or {}
        tuning = overrides.get("attn_temperature_tuning", by_length)
        source = getattr(model, "generation_config", "auto")
        if tuning is not True or source != "auto":
            changed["attn_temperature_tuning"] = [tuning, source]
    return changed


def _of_files(model: ModelConfig, *names: str) -> list[Any]:
    """Return what the configurations of a model's files say under some names, where they do."""
    configs = (model.hf_config, getattr(model, "hf_text_config", None))
    values = (getattr(config, name, None) for config in configs for name in names)
    return [value for value in values if value]


def _named(value: Any) -> str:
    """Name what JSON can't hold: a function by its place, anything else by what it prints."""
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else repr(value)
