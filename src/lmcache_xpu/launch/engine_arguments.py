"""What settings become: vLLM's arguments, LMCache's configuration, and the engine's variables.

LMCache's configuration travels inside vLLM's `--kv-transfer-config`, so the command line shows
everything and nothing can disagree with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from lmcache_xpu import versions
from lmcache_xpu.launch.fields import CPU_KV_CACHE_GIB, ENV_PREFIX
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers import PASSWORD_VARIABLE
from lmcache_xpu.transfer import pool_memory

SCHEDULER = "lmcache_xpu.vllm_connector.LMCacheXPUScheduler"
KEY_GUARD = "lmcache_xpu.vllm_hooks.key_guard.KeyGuard"


def vllm_arguments(settings: Settings) -> list[str]:
    """Return the arguments of `vllm serve`, the model first."""
    kv_cache_gib = settings.kv_cache_gib
    if kv_cache_gib is None and settings.device == "cpu":
        kv_cache_gib = CPU_KV_CACHE_GIB
    transfer = json.dumps(kv_transfer_config(settings)) if settings.offload else None
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": settings.kv_events}
    pipeline, data = settings.pipeline_parallel, settings.data_parallel
    # vLLM's choice for several engines gives each one's only worker a process of its own.
    in_process = settings.offload and settings.is_local and data > 1
    scheduler = settings.offload and not (settings.layerwise or settings.is_vllm)
    options: dict[str, object] = {
        "--host": settings.host,
        "--port": settings.port,
        "--served-model-name": settings.served_model_name,
        "--shutdown-timeout": settings.drain_s or None,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--block-size": settings.block_tokens,
        "--kv-cache-memory-bytes": kv_cache_gib and int(kv_cache_gib * 2**30),
        "--gpu-memory-utilization": settings.memory_fraction,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--pipeline-parallel-size": pipeline if pipeline > 1 else None,
        "--data-parallel-size": data if data > 1 else None,
        "--distributed-executor-backend": "uni" if in_process else None,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--max-num-seqs": settings.max_num_seqs,
        "--kv-transfer-config": transfer,
        "--kv-events-config": json.dumps(events) if settings.kv_events else None,
        "--scheduler-cls": SCHEDULER if scheduler else None,
        "--middleware": KEY_GUARD if settings.api_key is not None else None,
    }
    args = [settings.model]
    for option, value in options.items():
        args += [] if value is None else [option, str(value)]
    args.append(f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching")
    shown = settings.show_cached_tokens
    if settings.api_key is None if shown is None else shown:
        args.append("--enable-prompt-tokens-details")  # clients ask for nothing
    return [*args, *(["--enforce-eager"] if settings.enforce_eager else []), *settings.extra_args]


def kv_transfer_config(settings: Settings) -> dict[str, object]:
    """Return vLLM's KV transfer configuration, with LMCache's inside."""
    module = {"kv_connector_module_path": "lmcache_xpu.vllm_connector"}
    if settings.is_vllm:
        connector, module, options = "OffloadingConnector", {}, offloading_config(settings)
    elif settings.layerwise:
        connector = "LMCacheXPUConnector"
        options = {f"lmcache.{name}": value for name, value in lmcache_config(settings).items()}
    else:
        connector, options = "LMCacheXPUServerConnector", server_config(settings)
    return {
        "kv_connector": connector,
        **module,
        "kv_role": "kv_both",
        # A chunk may be lost between look-up and load; vLLM's default fails the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }


def offloading_config(settings: Settings) -> dict[str, object]:
    """Return the options of vLLM's own offloading, with this package's disk tier behind it.

    vLLM counts host memory for all devices of an engine together, and so does the tier its files.
    """
    disk = {
        "type": "DiskTier",
        "module_path": "lmcache_xpu.offloading.tier",
        "path": str(settings.disk_path),
        "gib": (settings.disk_gib or 0) * settings.ranks,
        # The tier is told nothing of vLLM's other options, which may change what is computed.
        "namespace": " ".join(settings.extra_args),
    }
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": int(settings.cpu_gib * settings.ranks * 2**30),
        "offload_prompt_only": not settings.save_decode,
        "secondary_tiers": [] if settings.disk_path is None else [disk],
    }


def lmcache_config(settings: Settings) -> dict[str, object]:
    """Return LMCache's configuration, in LMCache's names.

    Empty but with `layerwise`, where LMCache's own engine runs; else see `server_config`.
    """
    if not (settings.offload and settings.layerwise):
        return {}
    config: dict[str, object] = {
        "chunk_size": settings.chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": settings.cpu_gib,  # in units of 2**30 bytes, whatever its docs say
        "use_layerwise": True,
        "save_decode_cache": settings.save_decode,
        # An engine's block may be packed as one piece (CPU): no part of it can be copied.
        "save_unfull_chunk": False,
        # LMCache's default is Python's hash(), which differs from process to process.
        "pre_caching_hash_algorithm": "sha256",
    }
    if settings.kv_events is not None:
        config["enable_kv_events"] = True
    extra = _staging(settings)
    if settings.disk_path is not None:
        config["storage_plugins"] = ["disk"]
        extra |= {
            "storage_plugin.disk.module_path": "lmcache_xpu.tiers.stock_disk",
            "storage_plugin.disk.class_name": "DiskTier",
            "disk.path": str(settings.disk_path),
            "disk.gib": settings.disk_gib,
        }
    return {**config, "extra_config": extra}


def server_config(settings: Settings) -> dict[str, object]:
    """Return the options of LMCache's connector to its server, and of this package's."""
    options: dict[str, object] = {
        "lmcache.mp.save_decode_cache": settings.save_decode,
        "xpu.loads": settings.loads,
    }
    if settings.is_local:
        cache = {
            "chunk_tokens": settings.chunk_tokens,
            "cpu_gib": settings.cpu_gib,
            "disk_path": settings.disk_path and str(settings.disk_path),
            "disk_gib": settings.disk_gib or None,
            "remote_url": settings.remote_url,
            "tier_dtype": settings.tier_dtype if settings.tier_dtype != "auto" else None,
        }
        options["xpu.cache"] = {name: value for name, value in cache.items() if value is not None}
    else:
        options |= {
            "lmcache.mp.server_urls": settings.server_url,
            "lmcache.mp.mq_timeout": settings.server_timeout_s,
            # A lost server is noticed, and one that is there again is found, within so long.
            "lmcache.mp.heartbeat_interval": settings.server_timeout_s,
            "xpu.server_timeout_s": settings.server_timeout_s,
        }
    return options | _staging(settings)


def _staging(settings: Settings) -> dict[str, object]:
    return {} if settings.staging_mib is None else {"xpu.staging_mib": settings.staging_mib}


def engine_variables(settings: Settings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to be added to `environ`, the engine's: those that have no argument.

    What it says of PyTorch's allocator is kept and added to.
    """
    env = {
        # One hash seed for all of the engine's processes.
        "PYTHONHASHSEED": "0",
        # vLLM and LMCache both obey this one and report nothing to their makers.
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": settings.log_level.upper(),
        "LMCACHE_LOG_LEVEL": settings.log_level.upper(),
    }
    if settings.device == "cpu":
        # oneDNN keeps what it compiled for each of 1,024 numbers of tokens, and vLLM what it
        # needs again: half a GiB, and a heap that grows with every request, for nothing.
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
        if settings.is_local:
            # Else vLLM gives the only worker of a CPU engine a process of its own, apart from the
            # scheduler's, and the two would have two caches.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            # There vLLM lets torch compute in one thread, unless it is told how many.
            if "OMP_NUM_THREADS" not in environ:
                env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    if settings.device == "xpu" and settings.offload:
        env |= pool_memory.allocator_variables(environ, versions.installed().torch)
    if not settings.layerwise:
        env[f"{ENV_PREFIX}STOCK"] = "1"  # the in-process connector's patches stay away
    if settings.device == "cuda":
        env[f"{ENV_PREFIX}DEVICES"] = "cuda"  # where this package is off unless asked for
    if settings.api_key is not None:
        # Not an argument: every user of the machine can read those.
        env["VLLM_API_KEY"] = settings.api_key.get_secret_value()
    if settings.remote_password is not None:
        env[PASSWORD_VARIABLE] = settings.remote_password.get_secret_value()
    return env
