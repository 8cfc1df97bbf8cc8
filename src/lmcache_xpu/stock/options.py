"""What becomes of each of LMCache's options here: served, refused, or without effect.

One list, by which `lmcache_config` refuses, and from which `make docs` makes the tables of
docs/reference/lmcache-options.md. A test holds it complete against LMCache's own definitions.
"""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

__all__ = ["EXTRA", "OPTIONS", "VLLM", "Option", "Verdict", "extra_option"]

Verdict = Literal["served", "refused", "no effect"]


class Option(NamedTuple):
    """One option of LMCache.

    Attributes:
        name: LMCache's; in its `extra_config` perhaps a pattern, as in `shared.*`.
        verdict: whether it is served; what is refused may have its default value.
        note: of a served one what shows it, of a refused one what to do instead, else the cause.
    """

    name: str
    verdict: Verdict
    note: str


def _options(verdict: Verdict, note: str, *names: str) -> tuple[Option, ...]:
    return tuple(Option(name, verdict, note) for name in names)


_served = functools.partial(_options, "served")
_refused = functools.partial(_options, "refused")
_idle = functools.partial(_options, "no effect")
_ENGINE = "engine/test_options.py"
_UNCHECKED = "It keeps no checksum, so damage would be served. Use "
_UNTRIED = "It was not tried with these connectors; leave it unset."

OPTIONS = (
    *_served("engine/test_stock.py; a multiple of the engine's block", "chunk_size"),
    *_served("tiers/test_stock_disk.py; false keeps nothing in host memory", "local_cpu"),
    *_served("stock/test_options.py; more than 0", "max_local_cpu_size"),
    *_served("engine/test_stock.py, both ways", "use_layerwise"),
    *_served(_ENGINE, "save_decode_cache"),
    *_served(
        "model/test_kv_cache_facts.py; refused where a block can't be split",
        "save_unfull_chunk",
    ),
    *_served(
        "stock/test_config.py; Python's hash only with a PYTHONHASHSEED",
        "pre_caching_hash_algorithm",
    ),
    *_served("below", "extra_config"),
    *_served("tiers/test_stock_disk.py; also classes of your own", "storage_plugins"),
    *_served(
        f"{_ENGINE}; of host memory, the disk tier has LRU; use_layerwise wants LRU",
        "cache_policy",
    ),
    *_served(
        _ENGINE,
        "min_retrieve_tokens",
        "priority_limit",
        "py_enable_gc",
        "enable_kv_events",
        "lookup_timeout_ms",
        "blocking_timeout_secs",
        "pin_timeout_sec",
        "pin_check_interval_sec",
        "lmcache_instance_id",
    ),
    *_served(
        "LMCache's pool, for one latent KV cache of several workers", "reserve_local_cpu_size"
    ),
    *_refused(
        "In LMCache 0.5.6 each hit of a chunk after its first fails.",
        "enable_async_loading",
    ),
    *_refused(
        f"{_UNCHECKED}the disk tier: lmcache_xpu.disk.tier as a storage plugin.", "local_disk"
    ),
    *_refused(
        f"{_UNCHECKED}this package's own way, without LMCache's engine: setting remote_url.",
        "remote_url",
        "remote_storage_plugins",
    ),
    *_refused("It reads into a chunk, where KV lies in our own order.", "enable_blending"),
    *_refused("The connectors of this package take its place.", "use_gpu_connector_v3"),
    *_refused(
        "It brings a memory pool or a transfer of its own.",
        "enable_p2p",
        "enable_pd",
        "gds_path",
        "maru_path",
    ),
    *_refused("Nothing here was tried with LMCache's controller.", "enable_controller"),
    *_refused(
        "A chunk would be found in some tiers alone; it was not tried.",
        "store_location",
        "retrieve_locations",
    ),
    *_refused("Look-ups ask the engine's own workers.", "external_lookup_client"),
    *_refused(
        "The scheduler would open every tier a second time; a disk tier is for one process.",
        "enable_scheduler_bypass_lookup",
    ),
    *_refused(
        "Workers that are not asked may lack a chunk that the others promise.",
        "lookup_server_worker_ids",
    ),
    *_refused(
        "It stands between the scheduler and the look-ups; vLLM's metrics count hits.",
        "hit_miss_ratio",
        "enable_chunk_statistics",
    ),
    *_refused(
        "Its API asks for no password, shows the environment, and "
        "changes options and tiers of a running engine past all checks.",
        "internal_api_server_enabled",
        "run_script_api_enabled",
    ),
    *_refused(
        "It starts programs in the engine's process; start them beside it.",
        "runtime_plugin_locations",
    ),
    *_refused(
        "What it brings is unknown; put it into the file or the variables.", "remote_config_url"
    ),
    *_refused("It is for another engine than vLLM.", "enable_hidden_state_cache"),
    *_refused(
        f"{_UNTRIED} numactl binds an engine to a node.", "numa_mode", "local_cpu_use_hugepages"
    ),
    *_idle("of local_disk", "local_disk_path_sharding", "max_local_disk_size"),
    *_idle("of remote_url", "audit_actual_remote_url", "remote_serde"),
    *_idle(
        "of enable_blending",
        "blend_recompute_ratios",
        "blend_thresholds",
        "blend_check_layers",
        "blend_min_tokens",
        "blend_special_str",
    ),
    *_idle(
        "of enable_p2p and enable_pd",
        "p2p_host",
        "p2p_init_ports",
        "p2p_lookup_ports",
        "pd_role",
        "pd_buffer_size",
        "pd_buffer_device",
        "pd_peer_host",
        "pd_peer_init_port",
        "pd_peer_alloc_port",
        "pd_peer_query_port",
        "pd_proxy_host",
        "pd_proxy_port",
        "pd_allocation_timeout_sec",
        "pd_shutdown_timeout_sec",
        "pd_condition_poll_interval_sec",
        "pd_max_prefill_len",
        "pd_backend_mode",
        "pd_skip_proxy_notification",
        "transfer_channel",
        "nixl_backends",
    ),
    *_refused("It is a part of enable_pd.", "pd_bidirectional"),
    *_idle("of enable_nixl_storage", "nixl_buffer_size", "nixl_buffer_device"),
    *_idle("of gds_path", "gds_path_sharding", "gds_buffer_size", "use_gds", "gds_backend"),
    *_idle("of maru_path", "maru_pool_size"),
    *_idle(
        "of enable_controller",
        "controller_pull_url",
        "controller_reply_url",
        "lmcache_worker_ports",
        "lmcache_worker_ids",
        "lmcache_worker_heartbeat_delay_time",
        "lmcache_worker_heartbeat_time",
    ),
    *_idle("of SGLang", "mp_host", "mp_port"),
    *_idle(
        "LMCache 0.5.6 has no such allocator, and takes the whole pool at once",
        "enable_lazy_memory_allocator",
        "lazy_memory_initial_ratio",
        "lazy_memory_expand_trigger_ratio",
        "lazy_memory_step_ratio",
        "lazy_memory_safe_size",
    ),
    *_idle(
        "of enable_chunk_statistics",
        "chunk_statistics_auto_start_statistics",
        "chunk_statistics_auto_exit_timeout_hours",
        "chunk_statistics_auto_exit_target_unique_chunks",
        "chunk_statistics_strategy",
    ),
    *_idle(
        "of internal_api_server_enabled",
        "internal_api_server_host",
        "internal_api_server_port_start",
        "internal_api_server_include_index_list",
        "internal_api_server_socket_path_prefix",
        "script_allowed_imports",
    ),
    *_idle("of remote_config_url", "app_id"),
    *_idle(
        "of enable_hidden_state_cache",
        "max_hidden_state_cpu_size",
        "hidden_state_layers",
        "hidden_states_retrieve_mode",
    ),
)

EXTRA = (
    *_served(
        "launch/test_engine_arguments.py; staging_mib: our own",
        "xpu.*",
    ),
    *_served("tiers/test_stock_disk.py", "storage_plugin.*", "disk.*"),
    *_served(
        "stock/test_config.py; false alone: each worker keeps its own copy",
        "save_only_first_rank",
    ),
    *_idle("of save_only_first_rank", "first_rank_max_local_cpu_size"),
    *_idle("of remote_storage_plugins", "remote_storage_plugin.*", "use_exists_sync"),
    *_idle("always false: chunks have a name for it", "remote_enable_mla_worker_id_as0"),
    *_served(_ENGINE, "enable_cache_usage_details_in_response"),
    *_idle("of internal_api_server_enabled", "internal_api_server_*"),
    *_refused(
        "It brings a memory pool or a transfer of its own. Use the disk tier.",
        "enable_nixl_storage",
        "rust_raw_block.*",
        "dax.*",
        "shm_name",
    ),
    *_refused(
        "It hides the tiers of this package, which are closed at the end.", "audit_backend_enabled"
    ),
    *_refused("A store would wait for memory, and the engine for it.", "force_store_wait"),
    *_refused(_UNTRIED, "local_cpu.pinned_align_bytes"),
    *_idle("of numa_mode", "gpu_to_numa_mapping"),
    *_idle("of enable_async_loading", "lookup_backoff_time"),
    *_idle("of enable_blending", "enable_sparse"),
    *_idle("of enable_chunk_statistics", "chunk_statistics_*"),
    *_idle("of enable_nixl_storage", "nixl_*", "use_direct_io"),
    *_idle("of enable_p2p", "p2p_*"),
    *_idle("of maru_path", "maru_*"),
    *_idle("of enable_controller", "full_sync_*", "heartbeat_url", "kv_msg_*", "worker_socket_*"),
    *_idle("of local_disk and gds_path", "disk_io_threads", "use_odirect"),
    *_idle(
        "of connectors that LMCache brings, see remote_url",
        "audit_*",
        "aws_*",
        "azure_*",
        "connection_timeout",
        "disable_tls",
        "fs_*",
        "hf3fs_*",
        "infinistore_*",
        "mooncake_*",
        "password",
        "redis_url",
        "request_timeout",
        "resp_*",
        "s3_*",
        "sagemaker_*",
        "save_chunk_meta",
        "storage_root_dir",
        "tls_enable",
        "transfer_timeout",
        "username",
        "valkey_*",
    ),
    *_idle("of SGLang, and of LMCache's server", "lmcache.mp.*"),
    *_idle("of vLLM's kv_connector_extra_config, below", "lmcache_rpc_port"),
)

# Beside `lmcache.*` in vLLM's kv_connector_extra_config; read by LMCache's adapter.
VLLM = (
    *_refused(_UNTRIED, "lmcache.max_tokens_per_load", "skip_last_n_tokens"),
    *_served("names the socket of the look-ups; unset: by the engine's id", "lmcache_rpc_port"),
    *_idle("of save_unfull_chunk", "discard_partial_chunks"),
)


def extra_option(name: str) -> Option | None:
    """What becomes of a key of LMCache's `extra_config`; None for one of somebody else."""
    return next((option for option in EXTRA if fnmatchcase(name, option.name)), None)
