"""LMCache's configuration as vLLM's connector finds it: applied, made safe, checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from vllm.logger import init_logger

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.options import OPTIONS, VLLM, Option, extra_option

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SAFE_HASH = "sha256"
# Of LMCache's extra_config; of MLA models alone.
ONE_COPY = "save_only_first_rank"
ONE_NAME = "remote_enable_mla_worker_id_as0"
ENGINE = "disk.engine"  # the disk tier's name for it


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
    set_apart(config, extra, vllm_config.parallel_config)
    make_hash_safe(config, extra)
    if vllm_config.model_config.use_mla:
        keep_own_copies(config, extra, workers=vllm_config.parallel_config.world_size)
    return config


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
    own = {"extra_config": {**values, ENGINE: engine}, "internal_api_server_port_start": port}
    extra.update({f"lmcache.{name}": value for name, value in own.items()})
    apply(config, extra)


def make_hash_safe(config: LMCacheEngineConfig, extra: dict[str, Any]) -> None:
    """Give LMCache a hash that is the same in every process.

    Its default is Python's, which differs between processes unless PYTHONHASHSEED is fixed:
    keys would never match, and nothing would say so.

    Raises:
        SettingsError: the configuration insists on Python's.
    """
    algorithm = extra.get("lmcache.pre_caching_hash_algorithm", config.pre_caching_hash_algorithm)
    if algorithm != "builtin" or os.environ.get("PYTHONHASHSEED", "random") != "random":
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


def keep_own_copies(config: LMCacheEngineConfig, extra: dict[str, Any], *, workers: int) -> None:
    """Let each worker of an MLA model keep its own copy, as those of other models keep their part.

    LMCache's default is one copy, which the first worker broadcasts; the others have no tiers that
    our connector could use. Chunks count as found where all workers have them.

    Args:
        config: changed.
        extra: vLLM's settings, from which LMCache reads once more; changed.
        workers: that share the model.

    Raises:
        SettingsError: the configuration insists on one copy.
    """
    own = dict(config.extra_config or {})
    if own.get(ONE_COPY, False):
        raise SettingsError(
            f"LMCache {ONE_COPY} true with MLA on {workers} devices",
            "false: each device keeps a copy of its own",
            f"Leave {ONE_COPY} unset.",
        )
    own[ONE_COPY] = own[ONE_NAME] = False
    config.extra_config = own
    if "lmcache.extra_config" in extra:
        extra["lmcache.extra_config"] = own
    config.lookup_server_worker_ids = config.lookup_server_worker_ids or list(range(workers))


def use_layerwise(extra: Mapping[str, Any]) -> bool:
    """Whether LMCache will work layer by layer: vLLM's settings, the environment, or the file."""
    # Not by LMCache's own loader: vLLM asks before LMCache may be imported.
    value = extra.get("lmcache.use_layerwise", os.environ.get("LMCACHE_USE_LAYERWISE"))
    if value is None and (path := os.environ.get("LMCACHE_CONFIG_FILE")):
        value = (yaml.safe_load(Path(path).read_text()) or {}).get("use_layerwise")
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def load() -> LMCacheEngineConfig:
    """LMCache's configuration of this process, from the file LMCACHE_CONFIG_FILE and LMCACHE_*.

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
    """Refuse what our connectors don't have; see `options`.

    Args:
        config: LMCache's.
        extra: vLLM's kv_connector_extra_config.

    Raises:
        SettingsError: an option is refused, or says nothing to LMCache.
    """
    defaults = type(config).from_defaults()
    for option in OPTIONS:
        value = getattr(config, option.name)
        if option.verdict == "refused" and value != (usual := getattr(defaults, option.name)):
            raise _refusal(option, option.name, value, f"{usual!r}, its default")
    for name, value in (config.extra_config or {}).items():
        if (each := extra_option(name)) and each.verdict == "refused" and value:
            raise _refusal(each, f"extra_config {name}", value, "none")
    for name, value in (extra or {}).items():
        special = next((option for option in VLLM if option.name == name), None)
        if special is not None:
            if special.verdict == "refused" and value:
                raise _refusal(special, name, value, "none")
        elif name.startswith("lmcache.") and not hasattr(config, name.removeprefix("lmcache.")):
            close = difflib.get_close_matches(name, [f"lmcache.{o.name}" for o in OPTIONS], n=1)
            raise SettingsError(
                f"{name} in vLLM's kv_connector_extra_config",
                close[0] if close else "an option of LMCache",
                "docs/reference/lmcache-options.md has them.",
            )
    _check_values(config)


def _check_values(config: LMCacheEngineConfig) -> None:
    """Refuse values of served options that can't be served, alone or together."""
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


def _refusal(option: Option, name: str, value: object, expected: str) -> SettingsError:
    return SettingsError(f"LMCache {name} {value!r}", expected, option.note)
