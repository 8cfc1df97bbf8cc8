"""Which models can be offloaded: judged from their configuration, before vLLM starts.

`size`, `doctor`, `serve` and its `--dry-run` ask here, so that all of them say the same.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_xpu.cache_engine.layer_kinds import OTHER_WAYS, LayerKinds, read_config, states_error
from lmcache_xpu.errors import LMCacheXPUError, SettingsError
from lmcache_xpu.launch.settings import Cache, Settings
from lmcache_xpu.versions import Versions, check_groups, installed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["check_layers", "check_offload", "check_reachable", "chosen_cache", "with_cache"]

HUB_ANSWER_S = 3.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "VLLM_USE_MODELSCOPE")


def chosen_cache(config: PretrainedConfig, here: Versions | None = None) -> Cache:
    """Return where LMCache runs for a model, if that is left to us.

    As a server where the engine's process can't serve the layers, or keeps more of them than a hit
    needs.

    Args:
        config: of the model.
        here: versions that have to do it; None: any that are accepted.

    Raises:
        SettingsError: neither serves these layers.
        VersionError: a server would, with other versions.
    """
    try:
        if check_offload(config, "in-process").factor == 1:
            return "in-process"
        is_refused = False
    except SettingsError:
        is_refused = True
    try:
        check_offload(config, "server", here)
    except LMCacheXPUError:
        if is_refused:
            raise
        return "in-process"
    return "server"


def with_cache(settings: Settings) -> Settings:
    """Return settings in which `auto` is replaced by where LMCache runs for their model.

    A model that can't be read is left to the engine's process, whose connector looks again.

    Raises:
        SettingsError: nothing serves the layers.
        VersionError: names the versions that could.
    """
    if settings.cache != "auto":
        return settings
    config = None
    if settings.offload and not settings.lacks_with_server:
        config = _config(settings)
    cache = "in-process" if config is None else chosen_cache(config, installed())
    return settings.model_copy(update={"cache": cache})


def check_offload(
    config: PretrainedConfig, cache: Cache = "in-process", here: Versions | None = None
) -> LayerKinds:
    """Return the kinds of a language model's layers, if a prefix can be restored into them.

    Args:
        config: of the model.
        cache: where LMCache runs, as the setting says.
        here: versions that have to do it; None: any that are accepted.

    Raises:
        SettingsError: it can't; names the layers, and what can be done.
        VersionError: other versions could.
    """
    if cache == "auto":
        cache = chosen_cache(config, here)
    kinds = LayerKinds.of_config(config)
    if kinds.strange or (kinds.states and not kinds.attention):
        raise SettingsError(
            f"layers of {', '.join(kinds.strange or kinds.other)} in a {config.model_type}",
            "attention to the prompt or to a window of it, or states beside such layers",
            "A prefix can't be restored into other layers: serve this model with --no-offload.",
        )
    widths = _widths_differ(config)
    several = kinds.states or widths or bool(kinds.window and kinds.whole)
    if cache == "server":
        if several and here is not None:
            check_groups(here)
        return kinds
    if kinds.states:
        raise states_error(config)
    if kinds.window and not kinds.whole:
        raise SettingsError(
            f"attention to a window of {config.sliding_window} tokens alone in a "
            f"{config.model_type}",
            "attention to the whole prompt in some layers",
            "Use --cache server, or --no-offload (plain vLLM).",
        )
    if widths:
        raise SettingsError(
            f"heads of several sizes in a {config.model_type}",
            "layers that all have the same shape",
            OTHER_WAYS,
        )
    return kinds


def check_layers(settings: Settings) -> LayerKinds | None:
    """Refuse a model into whose layers no prefix can be restored, with what is installed.

    Of a model on a hub it reads what was downloaded before. What it can't read is left to the
    engine, where the connector refuses the same; then there are no kinds.

    Raises:
        SettingsError: names the layers.
        VersionError: names the versions that could.
    """
    if not settings.offload:
        return None
    if (config := _config(settings)) is None:
        return None
    return check_offload(config, with_cache(settings).cache, installed())


def _config(settings: Settings) -> PretrainedConfig | None:
    """Return a model's configuration; None where it is not here, or can't be read."""
    try:
        return read_config(settings.model, cached=True)
    except SettingsError:
        return None


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
