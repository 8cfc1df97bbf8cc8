"""An engine with the served options of LMCache that no other test sets: what is hit, and its bytes.

Run by engine/test_options.py, with the arguments MODEL DISK MODE.
"""

from __future__ import annotations

import gc
import sys
import time

from support.probes import end_with
from support.real_engine import CHUNK, Engine, prompt, restored, sampling

OPTIONS = {
    "lmcache.max_local_cpu_size": 0.02,  # ten chunks: of five prompts some are on disk alone
    "lmcache.min_retrieve_tokens": 300,
    "lmcache.priority_limit": 0,
    "lmcache.py_enable_gc": False,
    "lmcache.enable_kv_events": True,
    "lmcache.lookup_timeout_ms": 5000,
    "lmcache.blocking_timeout_secs": 20,
    "lmcache.pin_timeout_sec": 60,
    "lmcache.pin_check_interval_sec": 5,
    "lmcache.lmcache_instance_id": "of-a-test",
    "lmcache.save_decode_cache": True,
}
LENGTHS = [4 * CHUNK + 10 + number for number in range(5)]


def settle(worker):
    """Wait until what is queued for the disk is there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    manager = connector._lmcache_engine.lmcache_engine.storage_manager
    while manager.storage_backends["disk"]._writes.pending:
        time.sleep(0.005)


def ask(engine: Engine, tokens: list[int], priority: int = 0, **more: str) -> list[int]:
    asked = [{"prompt_token_ids": tokens, **more}]
    (answer,) = engine.llm.generate(asked, sampling(), use_tqdm=False, priority=[priority])
    engine.llm.collective_rpc(settle)  # so small a pool leaves little room for what is queued
    return list(answer.outputs[0].token_ids)


def again(engine: Engine, tokens: list[int], answer: list[int], cold: list[list[str]]) -> dict:
    """Asked once more, from a cache of zeros."""
    engine.forget()
    before = engine.external_hits()
    right = ask(engine, tokens) == answer
    hit = engine.external_hits() - before
    return {"right": right, "hit": hit, "restored": restored(cold, engine.blocks())}


def look(engine: Engine) -> dict:
    seen = []
    for length in LENGTHS:
        engine.forget()
        seen.append((prompt(length), ask(engine, prompt(length)), engine.blocks()))
    report: dict = {"long": [again(engine, *each) for each in seen]}

    engine.forget()
    short = prompt(CHUNK + 50)
    answer = ask(engine, short)
    report["short"] = again(engine, short, answer, engine.blocks())

    engine.forget()
    later = prompt(2 * CHUNK + 3)
    answer = ask(engine, later, priority=1)
    report["unimportant"] = again(engine, later, answer, engine.blocks())
    report["important"] = again(engine, later, answer, engine.blocks())

    engine.forget()
    start = prompt(2 * CHUNK - 10)  # the answer completes its second chunk
    answer = ask(engine, start)
    longer = [*start, *answer]
    engine.forget()
    before = engine.external_hits()
    hit = ask(engine, longer)
    hits = engine.external_hits() - before
    report["answer"] = {"right": hit == ask(engine, longer, cache_salt="another"), "hit": hits}
    report["collects"] = gc.isenabled()
    return report


if __name__ == "__main__":
    model, disk, mode = sys.argv[1:]
    policy = {"lmcache.cache_policy": "LFU"}
    settings = {"lmcache": OPTIONS | policy, "scheduling_policy": "priority"}
    end_with(lambda: Engine(model, disk, mode, **settings).close_after(look))
