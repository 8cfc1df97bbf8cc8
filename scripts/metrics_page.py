"""Make docs/reference/metrics.md."""

from __future__ import annotations

import re

from environment import ROOT
from markdown_table import rows

from lmcache_xpu import metrics

# Metrics of others that the dashboard or the alerts use.
OTHERS = {
    "vllm:num_requests_running": "Requests that the engine computes",
    "vllm:num_requests_waiting": "Requests in its queue",
    "vllm:num_preemptions_total": "Requests that lost their blocks and are computed again",
    "vllm:kv_cache_usage_perc": "Part of the engine's own KV cache in use, 0 to 1",
    "vllm:prefix_cache_queries_total": "Prompt tokens that the engine's own cache was asked for",
    "vllm:prefix_cache_hits_total": "Of these, tokens that it had",
    "vllm:external_prefix_cache_queries_total": "Tokens that the tiers were asked for",
    "vllm:external_prefix_cache_hits_total": "Of these, tokens that a tier had",
    "vllm:prompt_tokens_total": "Tokens of prompts",
    "vllm:prompt_tokens_by_source_total": "The same by `source`: computed, device or external hit",
    "vllm:generation_tokens_total": "Tokens of answers",
    "vllm:request_success_total": "Requests that ended, by `finished_reason`",
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token",
    "vllm:inter_token_latency_seconds": "Between two tokens of an answer",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to its end",
    "vllm:request_queue_time_seconds": "Time in the queue",
    "vllm:request_prefill_time_seconds": "Time from the queue to the first token",
    "lmcache_mp_l1_usage_ratio": "Part of the memory of LMCache's server in use, 0 to 1",
    "lmcache_mp_lookup_requested_tokens_total": "Tokens that the server was asked for",
    "lmcache_mp_lookup_hit_l1_tokens_total": "Of these, tokens that it had in memory",
    "lmcache_mp_lookup_hit_l2_tokens_total": "Of these, tokens that it had on its disk",
    "lmcache_mp_l1_evicted_chunks_total": "Chunks that its memory had no more room for",
    "lmcache_mp_l1_allocation_failure_chunks_total": "Chunks that found no room in its memory",
    "hw_gpu_utilization_ratio": "Utilisation of a GPU, from Intel's exporter",
    "hw_memory_usage_bytes": "Memory of a GPU in use, from Intel's exporter",
    "hw_power_watts": "Power of a GPU, from Intel's exporter",
    "hw_temperature_celsius": "Temperature of a GPU, from Intel's exporter",
    "hw_errors_total": "Errors that a GPU reports, from Intel's exporter",
    "up": "1 while Prometheus reaches the engine, the router or LMCache's server",
}
METRIC = re.compile(
    r"\b(?:vllm:|lmcache_mp_)\w+|\bhw_\w+_(?:ratio|bytes|watts|celsius|total)|\bup(?=\{)"
)


def used_metrics() -> set[str]:
    """Names of the metrics of others in the dashboard and in the alerts."""
    files = [ROOT / "monitoring/alerts.yaml", *(ROOT / "monitoring/dashboards").glob("*.json")]
    names = {name for file in files for name in METRIC.findall(file.read_text())}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def page(text: str) -> str:
    """docs/reference/metrics.md."""
    own = []
    for collector in (*metrics._COUNTERS.values(), *(lv.gauge for lv in metrics.LEVELS.values())):
        (family,) = collector.describe()
        counter = family.type == "counter"
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        name = family.name + ("_total" if counter else "")
        own.append((f"`{name}`", family.type, labels, family.documentation))
    reasons = [
        (f"`{flow.direction}`", f"`{flow.tier}`", f"`{reason}`", f"{meaning}.")
        for flow in metrics.FLOWS
        for reason, meaning in flow.reasons.items()
    ]
    fallbacks = [(f"`{name}`", f"{text}.") for name, text in metrics.FALLBACK_REASONS.items()]
    ways = [(f"`{name}`", f"{text}.") for name, text in metrics.LOAD_WAYS.items()]
    others = [(f"`{name}`", f"{OTHERS[name]}.") for name in OTHERS if name in used_metrics()]
    return f"""# Metrics

What does `/metrics` say of the cache, and what does each `reason` mean?

`lmcache-xpu serve` puts the metrics of this package and of vLLM on one page:
`http://HOST:8000/metrics`. Without `serve`, set `PROMETHEUS_MULTIPROC_DIR` to an empty directory.
LMCache's server has a page of its own.

## This package

{rows(("metric", "type", "labels", "what it counts"), own)}

`direction` is `store` or `load`. `tier` is where the bytes go to or come from:

| `tier` | between |
|---|---|
| `cpu` | the engine's KV cache and host memory |
| `disk` | host memory and files |
| `shared` | host memory and a Valkey or Redis server |
| `server` | the engine's KV cache and memory of LMCache's server |

A load from disk or server passes host memory, so it counts in `cpu` as well. The speed of a tier
while it moves is bytes divided by seconds:
`rate(lmcache_xpu_bytes_total[5m]) / rate(lmcache_xpu_seconds_total[5m])`.

An object is a chunk, or in models with several KV caches a part of one. With `layerwise` there is
nothing but what the disk tier moves; LMCache's own engine counts the rest.

## Reasons

Of `lmcache_xpu_errors_total`. An error costs a computation, never a wrong answer.

{rows(("`direction`", "`tier`", "`reason`", "what it means, and what to do"), reasons)}

Of `lmcache_xpu_fallbacks_total`:

{rows(("`reason`", "what it means"), fallbacks)}

Of `lmcache_xpu_loads_total`, which each worker counts; see the setting `loads`:

{rows(("`way`", "what it means"), ways)}

## Of vLLM, LMCache's server and the GPU

Those that the dashboard and the alerts of `monitoring/` use:

{rows(("metric", "what it is"), others)}

The hit rate of the tiers is `vllm:external_prefix_cache_hits_total` divided by
`vllm:external_prefix_cache_queries_total`: of the tokens that the engine itself did not have.
"""
