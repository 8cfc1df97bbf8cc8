"""LMCache's options that are refused here, each with what to do instead, or why.

`config` refuses by them, and `make docs` makes tables of them. The page
docs/reference/lmcache-options.md has the others, too; a test holds it complete against LMCache.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXTRA", "OPTIONS", "VLLM"]

_UNCHECKED = "It keeps no checksum, so damage would be served. Use "
_UNTRIED = "It was not tried with these connectors; leave it unset."


def _by_name(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in names_by_reason.items() for name in names.split()}


# Of LMCache's configuration; each may have its default value.
OPTIONS = _by_name(
    {
        "In LMCache 0.5.6 each hit of a chunk after its first fails.": "enable_async_loading",
        f"{_UNCHECKED}the disk tier: lmcache_xpu.disk.tier as a storage plugin.": "local_disk",
        f"{_UNCHECKED}this package's own way, without LMCache's engine: setting remote_url.": (
            "remote_url remote_storage_plugins"
        ),
        "It reads into a chunk, where KV lies in our own order.": "enable_blending",
        "The connectors of this package take its place.": "use_gpu_connector_v3",
        "It brings a memory pool or a transfer of its own.": (
            "enable_p2p enable_pd gds_path maru_path"
        ),
        "Nothing here was tried with LMCache's controller.": "enable_controller",
        "A chunk would be found in some tiers alone; it was not tried.": (
            "store_location retrieve_locations"
        ),
        "Look-ups ask the engine's own workers.": "external_lookup_client",
        "The scheduler would open every tier a second time; a disk tier is for one process.": (
            "enable_scheduler_bypass_lookup"
        ),
        "Workers that are not asked may lack a chunk that the others promise.": (
            "lookup_server_worker_ids"
        ),
        "It stands between the scheduler and the look-ups; vLLM's metrics count hits.": (
            "hit_miss_ratio enable_chunk_statistics"
        ),
        "Its API asks for no password, shows the environment, and "
        "changes options and tiers of a running engine past all checks.": (
            "internal_api_server_enabled run_script_api_enabled"
        ),
        "It starts programs in the engine's process; start them beside it.": (
            "runtime_plugin_locations"
        ),
        "What it brings is unknown; put it into the file or the variables.": "remote_config_url",
        "It is for another engine than vLLM.": "enable_hidden_state_cache",
        f"{_UNTRIED} numactl binds an engine to a node.": "numa_mode local_cpu_use_hugepages",
        "It is a part of enable_pd.": "pd_bidirectional",
    }
)

# Of LMCache's `extra_config`, by patterns; each may be unset or false.
EXTRA = _by_name(
    {
        "It brings a memory pool or a transfer of its own. Use the disk tier.": (
            "enable_nixl_storage rust_raw_block.* dax.* shm_name"
        ),
        "It hides the tiers of this package, which are closed at the end.": "audit_backend_enabled",
        "A store would wait for memory, and the engine for it.": "force_store_wait",
        _UNTRIED: "local_cpu.pinned_align_bytes",
    }
)

# Read by LMCache's adapter in vLLM's kv_connector_extra_config; each may be unset or 0.
VLLM = _by_name({_UNTRIED: "lmcache.max_tokens_per_load skip_last_n_tokens"})
