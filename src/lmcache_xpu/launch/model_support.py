"""Which models can be offloaded: judged from their configuration, before vLLM starts.

`size`, `doctor`, `serve` and its `--dry-run` ask here, so that all of them say the same.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_xpu.cache_engine.layer_kinds import LayerKinds, check_states, read_config
from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["check_layers", "check_offload", "check_reachable"]

HUB_ANSWER_S = 3.0
OTHER_WAYS = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "VLLM_USE_MODELSCOPE")


def check_offload(config: PretrainedConfig) -> LayerKinds:
    """Return the kinds of a language model's layers, if a prefix can be restored into them.

    Raises:
        SettingsError: it can't; names the layers.
    """
    check_states(config)
    kinds = LayerKinds.of_config(config)
    if kinds.other or (kinds.window and not kinds.whole):
        partial = kinds.other or (f"attention to a window of {config.sliding_window} tokens alone",)
        raise SettingsError(
            f"layers of {', '.join(partial)} in a {config.model_type}",
            "attention to the whole prompt in some layers, and nothing but attention",
            "A prefix can't be restored into other layers: serve this model with --no-offload.",
        )
    if _widths_differ(config):
        raise SettingsError(
            f"heads of several sizes in a {config.model_type}",
            "layers that all have the same shape",
            "Serve this model with --no-offload.",
        )
    return kinds


def check_layers(model: str) -> None:
    """Refuse a model into whose layers no prefix can be restored.

    Of a model on a hub it reads what was downloaded before. What it can't read is left to the
    engine, where the connector refuses the same.

    Raises:
        SettingsError: names the layers.
    """
    try:
        config = read_config(model, cached=True)
    except SettingsError:
        return
    check_offload(config)


def check_reachable(model: str) -> None:
    """Refuse a hub's model that was not downloaded and can't be: vLLM would try for a minute.

    Raises:
        SettingsError: the hub doesn't answer, or must not be asked.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(model).expanduser().exists() or model.startswith(("/", ".", "~")) or "://" in model:
        return
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise SettingsError(
            f"model={model}, which was not downloaded, and HF_HUB_OFFLINE",
            "a model directory, or a name on a hub that may be asked",
            "Unset HF_HUB_OFFLINE, or download the model first: `hf download`.",
        )
    if any(os.environ.get(name) for name in OTHER_WAYS):
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


def _widths_differ(config: PretrainedConfig) -> bool:
    """Whether layers differ in their heads, as Gemma 4's do; transformers keeps those apart."""
    layers: dict[str, dict[str, object]] = config.to_dict().get("per_layer_config") or {}
    return any("head_dim" in layer for layer in layers.values())
