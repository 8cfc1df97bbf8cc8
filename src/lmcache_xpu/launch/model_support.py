"""Which models can be offloaded: judged from their configuration, before vLLM starts.

`size`, `doctor`, `serve` and its `--dry-run` ask here, so that all of them say the same.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.model.layer_kinds import OTHER_WAYS, LayerKinds, read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_ANSWER_S = 3.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "VLLM_USE_MODELSCOPE")


def check_offload(config: PretrainedConfig, *, layerwise: bool = False) -> LayerKinds:
    """Return the kinds of a language model's layers, if a prefix can be restored into them.

    Args:
        config: of the model.
        layerwise: with LMCache's own engine.

    Raises:
        SettingsError: it can't; names the layers, and what can be done.
    """
    kinds = LayerKinds.of_config(config)
    if kinds.strange or (kinds.states and not kinds.attention):
        raise SettingsError(
            f"layers of {', '.join(kinds.strange or kinds.other)} in a {config.model_type}",
            "attention to the prompt or to a window of it, or states beside such layers",
            "A prefix can't be restored into other layers: serve this model with --no-offload.",
        )
    if not layerwise:
        return kinds
    widths = _widths_differ(config)
    if kinds.states or widths or (kinds.window and not kinds.whole):
        layers = "heads of several sizes" if widths else f"layers of {', '.join(kinds.names)}"
        raise SettingsError(
            f"{layers} in a {config.model_type}, with layerwise",
            "layers that all attend to the whole prompt and have the same shape",
            OTHER_WAYS,
        )
    return kinds


def check_layers(settings: Settings) -> LayerKinds | None:
    """Refuse a model into whose layers no prefix can be restored.

    Of a model on a hub it reads what was downloaded before. What it can't read is left to the
    engine, where the connector refuses the same; then there are no kinds.

    Raises:
        SettingsError: names the layers.
    """
    if not settings.offload:
        return None
    try:
        config = read_config(settings.model, cached=True)
    except SettingsError:
        return None
    return check_offload(config, layerwise=settings.layerwise)


def with_layers(settings: Settings, kinds: LayerKinds) -> Settings:
    """Return the settings that suit a model's layers.

    With states a chunk is one block: a state is kept at the end of any block. LMCache rounds a
    chunk up to whole blocks when the engine registers, which alone knows them, as a block of
    attention has to be as large as a state.
    """
    if (
        kinds.states
        and "chunk_tokens" not in settings.model_fields_set
        and settings.server_url is None
    ):
        settings = settings.model_copy(update={"chunk_tokens": 1})
    return settings


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


def _widths_differ(config: PretrainedConfig) -> bool:
    """Whether layers differ in their heads, as Gemma 4's do; transformers keeps those apart."""
    layers: dict[str, dict[str, object]] = config.to_dict().get("per_layer_config") or {}
    return any("head_dim" in layer for layer in layers.values())
