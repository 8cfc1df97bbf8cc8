"""LMCache's configuration as vLLM's connector finds it: applied, made safe, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from vllm.logger import init_logger

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import ParallelConfig

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SAFE_HASH = "sha256"
ENGINE = "disk.engine"  # the disk tier's name for it


def apply(config: LMCacheEngineConfig, extra: dict[str, Any]) -> None:
    """vLLM's `lmcache.*` settings into LMCache's configuration, as LMCache does later itself."""
    from lmcache.v1.config_base import validate_and_set_config_value

    for name, value in extra.items():
        if name.startswith("lmcache."):
            validate_and_set_config_value(config, name.removeprefix("lmcache."), value)


def set_apart(config: LMCacheEngineConfig, extra: dict[str, Any], parallel: ParallelConfig) -> None:
    """What an engine of several in one `serve` may not share with the others.

    vLLM tells LMCache's sockets apart by the engine's id. Left are the directories of the disk tier
    (`disk.engine`) and the ports of LMCache's internal API. The first engine keeps what is set.

    Args:
        config: LMCache's configuration, with vLLM's settings applied.
        extra: vLLM's settings, from which LMCache applies them again; changed as well.
        parallel: vLLM's.
    """
    # The rank is 0 in every engine of a dense model; this is not.
    engine = parallel.data_parallel_index
    values = dict(config.extra_config or {})
    if not engine or ENGINE in values:  # scheduler and worker may share `extra`
        return
    port = config.internal_api_server_port_start + engine * (1 + parallel.world_size)
    found = {"extra_config": {**values, ENGINE: engine}, "internal_api_server_port_start": port}
    extra.update({f"lmcache.{name}": value for name, value in found.items()})
    apply(config, extra)


def make_hash_safe(config: LMCacheEngineConfig, extra: dict[str, Any]) -> None:
    """Give LMCache a hash that is the same in every process.

    Its default is Python's, which differs between processes unless PYTHONHASHSEED is fixed:
    keys would never match, and nothing would say so.

    Raises:
        SettingsError: the configuration insists on Python's.
    """
    given = extra.get("lmcache.pre_caching_hash_algorithm", config.pre_caching_hash_algorithm)
    if given != "builtin" or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return
    if "lmcache.pre_caching_hash_algorithm" in extra:
        raise SettingsError(
            "LMCache pre_caching_hash_algorithm 'builtin' without PYTHONHASHSEED",
            f"{SAFE_HASH!r}, or a fixed PYTHONHASHSEED",
            "Python's hash differs between processes, so nothing would ever be found.",
        )
    config.pre_caching_hash_algorithm = SAFE_HASH
    logger.warning(
        "PYTHONHASHSEED is not set: LMCache's keys use %s instead of Python's hash, which "
        "differs between processes",
        SAFE_HASH,
    )


def use_layerwise(extra: Mapping[str, Any]) -> bool:
    """Whether LMCache will work layer by layer: vLLM's settings, the environment, or the file."""
    # Not by LMCache's own loader: vLLM asks before LMCache may be imported.
    value = extra.get("lmcache.use_layerwise", os.environ.get("LMCACHE_USE_LAYERWISE"))
    if value is None and (path := os.environ.get("LMCACHE_CONFIG_FILE")):
        value = (yaml.safe_load(Path(path).read_text()) or {}).get("use_layerwise")
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def check_features(config: LMCacheEngineConfig) -> None:
    """Refuse what our connectors don't have.

    Raises:
        SettingsError: a feature is switched on.
    """
    for name in ("enable_blending", "use_gpu_connector_v3"):
        if getattr(config, name):
            raise SettingsError(f"LMCache {name} true", "false: it is not supported here")
    if config.remote_serde not in (None, "naive"):
        raise SettingsError(
            f"LMCache remote_serde {config.remote_serde!r}",
            "'naive': others look into a chunk, where keys and values lie in our own order",
        )
