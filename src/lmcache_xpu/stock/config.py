"""LMCache's configuration as vLLM's connector finds it: applied, made safe, checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from vllm.logger import init_logger

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.options import EXTRA, OPTIONS, VLLM

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SAFE_HASH = "sha256"


def prepare(vllm_config: VllmConfig) -> LMCacheEngineConfig:
    """Return LMCache's configuration for an engine: completed, made safe, and checked.

    Args:
        vllm_config: of the engine; vLLM's settings of LMCache are completed in it, because LMCache
            reads them once more.

    Raises:
        SettingsError: the configuration can't be served.
    """
    config, transfer = load(), vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config = extra = transfer.kv_connector_extra_config or {}
    apply(config, extra)
    check_features(config, extra)
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1 or parallel.data_parallel_index:
        raise SettingsError(
            "several devices with LMCache's own engine",
            "one device",
            "Use the connector LMCacheXPUServerConnector, as `lmcache-xpu serve` does.",
        )
    make_hash_safe(config, extra)
    if vllm_config.model_config.use_mla:  # LMCache's default broadcasts an only copy
        own = {**(config.extra_config or {}), "save_only_first_rank": False}
        config.extra_config = extra["lmcache.extra_config"] = own
    return config


def apply(config: LMCacheEngineConfig, extra: Mapping[str, Any]) -> None:
    """Apply vLLM's `lmcache.*` settings to LMCache's configuration, as LMCache does again later."""
    from lmcache.v1.config_base import validate_and_set_config_value

    for name, value in extra.items():
        if name.startswith("lmcache."):
            validate_and_set_config_value(config, name.removeprefix("lmcache."), value)


def make_hash_safe(config: LMCacheEngineConfig, extra: Mapping[str, Any]) -> None:
    """Give LMCache a hash that is the same in every process.

    Its default is Python's, which differs between processes unless PYTHONHASHSEED is fixed:
    keys would never match, and nothing would say so.

    Raises:
        SettingsError: the configuration insists on Python's.
    """
    is_python_hash = config.pre_caching_hash_algorithm == "builtin"
    if not is_python_hash or os.environ.get("PYTHONHASHSEED", "random") != "random":
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
        "differs between processes (docs: troubleshooting#python-hash)",
        SAFE_HASH,
    )


def use_layerwise(extra: Mapping[str, Any]) -> bool:
    """Whether LMCache will work layer by layer: vLLM's settings, the environment, or the file."""
    # Not by LMCache's own loader: vLLM asks before LMCache may be imported.
    value = extra.get("lmcache.use_layerwise", os.environ.get("LMCACHE_USE_LAYERWISE"))
    if value is None and (path := os.environ.get("LMCACHE_CONFIG_FILE")):
        value = (yaml.safe_load(Path(path).read_text()) or {}).get("use_layerwise")
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def load() -> LMCacheEngineConfig:
    """Return LMCache's configuration of this process, from LMCACHE_CONFIG_FILE and LMCACHE_*.

    Raises:
        SettingsError: LMCache itself refuses it.
    """
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config

    try:
        return lmcache_get_or_create_config()
    except (AssertionError, ValueError) as error:
        raise SettingsError(
            f"an LMCache configuration that LMCache refuses: {error or 'a setting misses others'}",
            "one that it takes",
            "docs/reference/lmcache-options.md has its options.",
        ) from error


def check_features(config: LMCacheEngineConfig, extra: Mapping[str, Any] | None = None) -> None:
    """Refuse options that can't be served; see `options`.

    Args:
        config: LMCache's.
        extra: vLLM's kv_connector_extra_config.

    Raises:
        SettingsError: an option or a value is refused, or LMCache has no such option.
    """
    defaults = type(config).from_defaults()
    for name, reason in OPTIONS.items():
        value, default = getattr(config, name), getattr(defaults, name)
        if value != default:
            raise SettingsError(f"LMCache {name} {value!r}", f"{default!r}, its default", reason)
    for name, value in (config.extra_config or {}).items():
        for pattern, reason in EXTRA.items():
            if value and fnmatchcase(name, pattern):
                raise SettingsError(f"LMCache extra_config {name} {value!r}", "none", reason)
    for name, value in (extra or {}).items():
        if value and name in VLLM:
            raise SettingsError(f"LMCache {name} {value!r}", "none", VLLM[name])
        option = name.removeprefix("lmcache.")
        if option != name and name not in VLLM and not hasattr(config, option):
            close = difflib.get_close_matches(name, [f"lmcache.{each}" for each in vars(config)])
            raise SettingsError(
                f"{name} in vLLM's kv_connector_extra_config",
                close[0] if close else "an option of LMCache",
                "docs/reference/lmcache-options.md has them.",
            )
    if config.max_local_cpu_size <= 0:
        raise SettingsError(
            f"LMCache max_local_cpu_size {config.max_local_cpu_size:g}",
            "more than 0: all chunks go through this memory",
        )
    if config.use_layerwise and config.cache_policy.upper() != "LRU":
        raise SettingsError(
            f"LMCache use_layerwise with cache_policy {config.cache_policy!r}",
            "LRU with use_layerwise",
            "Others evict some layers of what has just come, and the rest of it is of no use.",
        )
