"""An engine that stores a prompt, or is asked for one that another version has stored.

Run as `python probe.py STEP CASE`, in a directory that has the model in `model/` and the chunks of
the disk tier in a directory by the name of the case; STEP is `store` or `hit`. Prints a JSON object
last.

The configuration is written out as users hold it, and nothing here imports the package: so the same
file runs with the code of every version, and a name that users hold can't change unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine and its metrics in this process
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    PYTHONHASHSEED="0",  # what LMCache's hashes begin with
    DO_NOT_TRACK="1",
    ONEDNN_PRIMITIVE_CACHE_CAPACITY="0",
)

BLOCK, CHUNK = 32, 64
PROMPT = [5 + 7 * position % 97 for position in range(2 * CHUNK + 5)]

DISK: dict[str, Any] = {
    "storage_plugins": ["disk"],
    "extra_config": {
        "storage_plugin.disk.module_path": "lmcache_xpu.tiers.stock_disk",
        "storage_plugin.disk.class_name": "DiskTier",
        "disk.gib": 0.1,
    },
}
# Both hashes that name chunks, both modes of LMCache's own engine. What is stored is kept in the
# repository, so one case has one chunk and the other two, of which the second is named by the first
# too.
CASES: dict[str, dict[str, Any]] = {
    "standard": DISK | {"pre_caching_hash_algorithm": "sha256"},
    "layerwise": DISK | {"pre_caching_hash_algorithm": "sha256_cbor", "use_layerwise": True},
}
LOCAL = "local"  # the cache in the engine's process, with the directory of the standard case
CHUNKS = {"standard": 2, "layerwise": 1, LOCAL: 2}
SALTS = {"layerwise": {"cache_salt": "a client's"}}  # a salt is part of the names of chunks, too


def prompt(case: str) -> list[int]:
    return PROMPT[: CHUNKS[case] * CHUNK + 5]


def transfer_config(case: str) -> dict[str, Any]:
    connector = {
        "kv_connector": "LMCacheXPUConnector",
        "kv_connector_module_path": "lmcache_xpu.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if case == LOCAL:
        cache = {"chunk_tokens": CHUNK, "cpu_gib": 0.05, "disk_path": "standard", "disk_gib": 0.1}
        return connector | {
            "kv_connector": "LMCacheXPUServerConnector",
            "kv_connector_extra_config": {"xpu.cache": cache},
        }
    lmcache = {
        "chunk_size": CHUNK,
        "local_cpu": True,
        "max_local_cpu_size": 0.05,
        "save_unfull_chunk": False,
        **CASES[case],
    }
    lmcache["extra_config"] = lmcache["extra_config"] | {"disk.path": case}
    options = {f"lmcache.{key}": value for key, value in lmcache.items()}
    return connector | {"kv_connector_extra_config": options}


def caches(worker):
    return list(worker.model_runner.kv_caches)


def zero(worker):
    for cache in caches(worker):
        cache.zero_()


def digests(worker):
    """Per layer, the digests of the blocks that hold anything."""
    return [
        [hashlib.sha256(b.contiguous().numpy().tobytes()).hexdigest() for b in cache if b.any()]
        for cache in caches(worker)
    ]


def package_metric(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(f"lmcache_xpu_{name}_total", labels) or 0.0


class Engine:
    """The engine and what is asked of it."""

    def __init__(self, case: str) -> None:
        from vllm import LLM

        self.case = case
        self.llm = LLM(
            "model",  # a part of each chunk's key, so the same wherever the directory lies
            skip_tokenizer_init=True,
            dtype="float32",  # whose blocks are packed alike on every x86-64
            block_size=BLOCK,
            max_model_len=512,
            enforce_eager=True,
            kv_cache_memory_bytes=2**22,
            disable_log_stats=False,
            kv_transfer_config=transfer_config(case),
        )

    def ask(self, **options: str) -> list[int]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(zero)
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        request = {"prompt_token_ids": prompt(self.case), **options}
        (answer,) = self.llm.generate([request], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def hits(self) -> int:
        metrics = {metric.name: metric for metric in self.llm.get_metrics()}
        return metrics["vllm:external_prefix_cache_hits"].value


def store(engine: Engine) -> dict[str, Any]:
    return {"answer": engine.ask(**SALTS.get(engine.case, {})), "hits": engine.hits()}


def hit(engine: Engine) -> dict[str, Any]:
    answer, hits = engine.ask(**SALTS.get(engine.case, {})), engine.hits()
    result = {
        "answer": answer,
        "hits": hits,
        "blocks": engine.llm.collective_rpc(digests)[0],
        "loaded": package_metric("tokens", direction="load", tier="disk"),
        "fallbacks": package_metric("fallbacks", reason="load"),
    }
    result["computed"] = engine.ask(cache_salt="computed")
    time.sleep(1)  # what was computed is stored beside the engine
    return result | {"again": engine.ask(**SALTS.get(engine.case, {})), "hits again": engine.hits()}


if __name__ == "__main__":
    step, case = sys.argv[1:]
    status = 1
    try:
        engine = Engine(case)
        result = {"store": store, "hit": hit}[step](engine)
        engine.llm.llm_engine.engine_core.shutdown()  # what is queued for a tier gets there
        print("\n" + json.dumps(result), flush=True)
        status = 0
    except Exception:  # whatever it is: threads of LMCache would keep a failed process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
