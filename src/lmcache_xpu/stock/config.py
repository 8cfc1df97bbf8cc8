"""LMCache's configuration as vLLM's connector finds it: applied, made safe, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from vllm.logger import init_logger

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# What is served of LMCache's options, each with a test in docs/reference/lmcache-options.md. All
# others bring tiers without checksums, memory or transfers of their own, or were not tried.
_NAMES = """
blocking_timeout_secs cache_policy chunk_size enable_kv_events extra_config lmcache_instance_id
local_cpu lookup_timeout_ms max_local_cpu_size min_retrieve_tokens pin_check_interval_sec
pin_timeout_sec pre_caching_hash_algorithm priority_limit py_enable_gc reserve_local_cpu_size
save_decode_cache save_unfull_chunk storage_plugins use_layerwise
"""
SERVED = frozenset(_NAMES.split())
SERVED_EXTRA = (
    *("disk.*", "storage_plugin.*", "xpu.*"),
    *("enable_cache_usage_details_in_response", "save_only_first_rank"),
)
UNTRIED = ("skip_last_n_tokens",)  # LMCache's adapter reads it from vLLM's settings
SAFE_HASH = "sha256"


def prepare(vllm_config: VllmConfig) -> LMCacheEngineConfig:
    """Return LMCache's configuration for an engine: completed, made safe, and checked.

    vLLM's settings of LMCache are completed in vLLM's configuration: LMCache reads them once more.
    Raises SettingsError if the configuration can't be served.
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


def make_hash_safe(config: LMCacheEngineConfig, extra: dict[str, Any]) -> None:
    """Give LMCache a hash that is the same in every process, in vLLM's settings, too.

    Its default is Python's, which differs between processes unless PYTHONHASHSEED is fixed:
    keys would never match, and nothing would say so.
    """
    is_python_hash = config.pre_caching_hash_algorithm == "builtin"
    if not is_python_hash or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return
    config.pre_caching_hash_algorithm = extra["lmcache.pre_caching_hash_algorithm"] = SAFE_HASH
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
    """Return LMCache's configuration of this process, from LMCACHE_CONFIG_FILE and LMCACHE_*."""
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
    """Refuse options that are not served and differ from their defaults, or that are unknown.

    `extra` is vLLM's kv_connector_extra_config.
    """
    defaults = vars(type(config).from_defaults())
    unserved = {
        f"LMCache {name} {getattr(config, name)!r}": f"{default!r}, its default"
        for name, default in defaults.items()
        if not name.startswith("_") and name not in SERVED and getattr(config, name) != default
    }
    for name, value in (config.extra_config or {}).items():
        if value and not any(fnmatchcase(name, pattern) for pattern in SERVED_EXTRA):
            unserved[f"LMCache extra_config {name} {value!r}"] = "none"
    for name, value in (extra or {}).items():
        unknown = name.startswith("lmcache.") and name.removeprefix("lmcache.") not in defaults
        if unknown or (value and name in UNTRIED):
            unserved[f"{name} in vLLM's kv_connector_extra_config"] = "an option that is served"
    if config.max_local_cpu_size <= 0:
        size = f"LMCache max_local_cpu_size {config.max_local_cpu_size:g}"
        unserved[size] = "more than 0: all chunks go through this memory"
    if config.use_layerwise and config.cache_policy.upper() != "LRU":
        policy = f"LMCache use_layerwise with cache_policy {config.cache_policy!r}"
        unserved[policy] = "LRU: others evict some layers of what has just come"
    fix = "docs/reference/lmcache-options.md has what is served."
    for option, expected in unserved.items():
        raise SettingsError(option, expected, fix)
