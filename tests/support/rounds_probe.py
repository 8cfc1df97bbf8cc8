"""Engines made and destroyed in this process, on one disk.

Run by engine/test_rounds.py, with the arguments MODEL DISK ROUNDS. Prints a JSON object last,
with one more engine that nobody destroys: the process is to end all the same.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time

import psutil
from support.probes import connector_options

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TOKENIZERS_PARALLELISM="false")

PROMPT = [300 + number % 3000 for number in range(600)]
CPU_GIB = 0.25


def engine(model: str, disk: str):
    from vllm import LLM

    connector = connector_options({"model": model, "cpu_gib": CPU_GIB, "disk_path": disk})
    return LLM(
        model,
        dtype="float32",
        block_size=128,
        max_model_len=1024,
        max_num_batched_tokens=512,
        enforce_eager=True,
        kv_cache_memory_bytes=2**25,
        disable_log_stats=False,
        **connector,
    )


def ask(llm) -> dict:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "answer": list(answers[0].outputs[0].token_ids),
        "hits": metrics["vllm:external_prefix_cache_hits"].value,
        "mode": type(get_kv_transfer_group()).__name__,
    }


def state() -> dict:
    gc.collect()
    process = psutil.Process()
    return {
        "mib": process.memory_info().rss / 2**20,
        "threads": process.num_threads(),
        "named": sorted(thread.name for thread in threading.enumerate()),
        "files": process.num_fds(),
        "sockets": len(process.net_connections("all")),
    }


if __name__ == "__main__":
    model, disk, rounds = sys.argv[1:]
    engines, states, seconds = [], [], []
    for _ in range(int(rounds)):
        begin = time.monotonic()
        llm = engine(model, disk)
        engines.append(ask(llm))
        del llm
        states.append(state())
        seconds.append(round(time.monotonic() - begin, 1))
    llm = engine(model, disk)
    engines.append(ask(llm))
    print("\n" + json.dumps({"found": engines, "states": states, "seconds": seconds}), flush=True)
