"""Which models can be offloaded: judged from their configuration, before vLLM starts.

`size`, `doctor`, `serve` and its `--dry-run` ask here, so that all of them say the same. `size`
reads a config.json that says all that counts as it is: transformers takes seconds to import, and an
environment for `size` alone has none. What a file leaves out, transformers knows.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.model.layer_kinds import OTHER_WAYS, LayerKinds, read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_ANSWER_S = 3.0
_INDEX = "model.safetensors.index.json"
MODELS = "a model directory, a config.json, or the name of a model on a hub"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "VLLM_USE_MODELSCOPE")
_ALWAYS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_HEADS, _SIZE, _KINDS = "num_key_value_heads", "head_dim", "layer_types"
# Families whose files are read as they are, and what a file has to say for that; the rest of what
# counts is the same in transformers' classes, by default.
_FAMILIES = {
    "llama": (),
    "mistral": (_HEADS, "sliding_window"),
    "qwen2": (_HEADS,),
    "deepseek_v2": ("kv_lora_rank", "qk_rope_head_dim"),
    "deepseek_v3": ("kv_lora_rank", "qk_rope_head_dim"),
    "gpt_oss": (_HEADS, _SIZE, _KINDS, "sliding_window"),
    "gemma3_text": (_HEADS, _SIZE, _KINDS, "sliding_window"),
    "granitemoehybrid": (_HEADS, _KINDS),
    **dict.fromkeys(("mixtral", "qwen2_moe", "phi3", "granite", "granitemoe", "olmo2"), (_HEADS,)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "glm4_moe"), (_HEADS, _SIZE)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        (_HEADS, _SIZE, _KINDS, "linear_key_head_dim", "linear_num_value_heads"),
    ),
}


def check_offload(
    config: PretrainedConfig, *, layerwise: bool = False, tier_dtype: str = "auto"
) -> LayerKinds:
    """Return the kinds of a language model's layers, if a prefix can be restored into them.

    With `layerwise`, by LMCache's own engine; from tiers of this dtype. Raises SettingsError if
    it can't, which names the layers, and what can be done.
    """
    if getattr(config, "is_encoder_decoder", False):
        kind = f"a {config.model_type}, an encoder and a decoder"
        raise SettingsError(kind, "a decoder alone", "Serve such a model with --no-offload.")
    kinds = LayerKinds.of_config(config)
    if kinds.strange or (kinds.states and not kinds.attention):
        raise SettingsError(
            f"layers of {', '.join(kinds.strange or kinds.other)} in a {config.model_type}",
            "attention to the prompt or to a window of it, or states beside such layers",
            "A prefix can't be restored into other layers: serve this model with --no-offload.",
        )
    if kinds.states and tier_dtype != "auto":
        raise SettingsError(
            f"tier_dtype={tier_dtype} for a {config.model_type}, whose layers keep states",
            "layers that all attend to the prompt: a state has no error to spare",
            "Leave tier_dtype unset.",
        )
    if not layerwise:
        return kinds
    # Where layers differ in their heads, as Gemma 4's do, transformers keeps those apart.
    layers: dict[str, dict[str, object]] = config.to_dict().get("per_layer_config") or {}
    widths = any("head_dim" in layer for layer in layers.values())
    if kinds.states or widths or (kinds.window and not kinds.whole):
        what = "heads of several sizes" if widths else f"layers of {', '.join(kinds.names)}"
        raise SettingsError(
            f"{what} in a {config.model_type}, with layerwise",
            "layers that all attend to the whole prompt and have the same shape",
            OTHER_WAYS,
        )
    return kinds


def check_layers(settings: Settings) -> LayerKinds | None:
    """Refuse a model into whose layers no prefix can be restored.

    What it does not know, or what was not downloaded before, is left to the engine, where the
    connector refuses the same; then there are no kinds. Raises SettingsError that names the layers,
    or what is wrong in the file.
    """
    if not settings.offload:
        return None
    try:
        config = read_config(settings.model, cached=True)
    except SettingsError as error:
        from huggingface_hub.errors import StrictDataclassError

        if isinstance(error.__cause__, json.JSONDecodeError | StrictDataclassError):
            raise  # vLLM would stop at it too, with a traceback
        return None
    return check_offload(config, layerwise=settings.layerwise, tier_dtype=settings.tier_dtype)


def with_layers(settings: Settings, kinds: LayerKinds) -> Settings:
    """Return the settings that suit a model's layers.

    With states a chunk is one block: a state is kept at the end of any block. LMCache rounds a
    chunk up to whole blocks when the engine registers, which alone knows them, as a block of
    attention has to be as large as a state.
    """
    chosen = "chunk_tokens" in settings.model_fields_set or settings.server_url is not None
    return settings.model_copy(update={"chunk_tokens": 1} if kinds.states and not chosen else {})


def check_reachable(model: str) -> None:
    """Refuse a hub's model that is not here if the hub is silent: vLLM would try for a minute."""
    if Path(model).expanduser().exists() or model.startswith(("/", ".", "~")) or "://" in model:
        return
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise SettingsError(
            f"model={model}, which was not downloaded, and HF_HUB_OFFLINE",
            "a model directory, or a name on a hub that may be asked",
            "Unset HF_HUB_OFFLINE, or download the model first: `hf download`.",
        )
    if any(os.environ.get(name) for name in PROXIES):
        return
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), HUB_ANSWER_S).close()
    except OSError as error:
        raise SettingsError(
            f"no answer from {constants.ENDPOINT} ({error.strerror or error}), and model={model} "
            "was not downloaded before",
            "a hub that answers, or a model directory",
            "Check the network; HTTPS_PROXY names a proxy, HF_ENDPOINT another hub.",
        ) from error


def read_model(model: str) -> Any:
    """Return the configuration of the language model in a directory, a file, or on a hub.

    Its attributes have transformers' names. Raises SettingsError if there is none, it is wrong, or
    this needs transformers.
    """
    path = Path(model).expanduser()
    if not path.exists():
        if path.suffix or model.startswith(("/", ".", "~")):
            raise SettingsError(f"model={model}, which does not exist", MODELS)
        path = _from_hub(model)
    values = _values(path / "config.json" if path.is_dir() else path)
    text = {**values, **(values.get("text_config") or {})}
    if (interval := text.get("full_attention_interval")) and not text.get(_KINDS):
        numbers = range(1, text["num_hidden_layers"] + 1)
        text[_KINDS] = [f"{'linear' if n % interval else 'full'}_attention" for n in numbers]
    text["dtype"] = text.get("dtype") or text.get("torch_dtype")
    needed = _FAMILIES.get(str(text.get("model_type")))
    if text.get("use_sliding_window"):  # transformers says which layers
        needed = None
    right = {name for name, value in text.items() if not isinstance(value, str)}
    missing = None if needed is None else [n for n in (*_ALWAYS, *needed) if n not in right]
    return SimpleNamespace(**text) if missing == [] else _complete(path, values, missing)


def _from_hub(model: str) -> Path:
    check_reachable(model)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"no config.json of model={model} ({str(error).splitlines()[0]})",
            MODELS,
            "Check the name; HF_TOKEN is the key to models that need one.",
        ) from error


def _values(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(
            f"{path} ({type(error).__name__}: {str(error).splitlines()[0]})",
            "a model's config.json",
        ) from error
    return values


def _complete(path: Path, values: Mapping[str, Any], missing: list[str] | None) -> Any:
    """Return the configuration with what transformers knows of the model's kind."""
    try:
        config = read_config(str(path))
    except ImportError as error:
        lacks = f", without {', '.join(missing)}" if missing else ""
        raise SettingsError(
            f"a config.json of a {values.get('model_type')}{lacks}, and no transformers here",
            "transformers, which knows what such a file leaves out",
            "`pip install transformers`.",
        ) from error
    # Where layers differ, transformers' object refuses to say the usual one, and this does not.
    facts = config.to_dict()
    for name in {*config.attribute_map, "layers_block_type", _KINDS} - facts.keys():
        facts[name] = getattr(config, name, None)
    return SimpleNamespace(**{"quantization_config": values.get("quantization_config")} | facts)


def weights_bytes(model: str) -> int | None:
    """Return the bytes of a model's weights; None where only its configuration is at hand."""
    path = Path(model).expanduser()
    if path.is_file():
        return None
    if path.is_dir():
        index = path / _INDEX
        if index.is_file() and (total := _values(index).get("metadata", {}).get("total_size")):
            return int(total)
        files = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    else:
        from huggingface_hub import HfApi

        try:
            siblings = HfApi().model_info(model, files_metadata=True).siblings or ()
        except (OSError, ValueError):
            return None
        files = {file.rfilename: file.size or 0 for file in siblings}
    # Some hold the same a second time, as consolidated.*.safetensors.
    names = (
        name
        for name in files
        if name.endswith(".safetensors") and not name.startswith("consolidated") and "/" not in name
    )
    return sum(files[name] for name in names) or None
