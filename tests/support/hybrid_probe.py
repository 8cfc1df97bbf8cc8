"""A real vLLM on CPU with windows or states, hybrid manager on, and a cache.

Run by engine/test_groups.py with the arguments KIND MODEL PLACE LOADS, of which PLACE is the
server's URL or a disk tier's path, and LOADS the setting; prints a JSON object last. What a step
computed is kept as digests when its stores begin, block by block in every group. What a load
brought is compared with it when vLLM hears of the load: before anything else is computed, or of a
load inside a step behind it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.probes import end_with
from support.real_engine import Engine, prompt
from support.server_workers import ways

STEP, QUESTION, LONG_QUESTION = 2048, 200, 700  # tokens
DOCUMENTS = (1900, 2248)  # the first ends within the first step, the other behind it
WINDOWS = {"dtype": "float32", "load_format": "dummy"}
STATES = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float32",  # vLLM 0.26 has no other kernel for CPU
}
KINDS: dict[str, dict[str, Any]] = {
    "windows": {"dtype": "float32"},
    "windows alone": WINDOWS,
    "heads of two sizes": WINDOWS,
    "sinks": {**WINDOWS, "dtype": "bfloat16"},
    "stretches": WINDOWS,
    "states": STATES,
    "states, dense": STATES,
}
TEXT_ALONE = Path(__file__).with_name("text_alone")  # what is imported for images
Digests = dict[tuple[int, int], list[str]]  # of layers' blocks, by group and place in the prompt
Seen = Callable[[Any, Digests], None]
computed: Digests = {}
brought: Digests = {}


def layers(worker) -> list[list[list[Any]]]:
    """By group and layer, the tensors that hold blocks."""
    runner = worker.model_runner
    context = runner.compilation_config.static_forward_context
    groups = []
    for group in runner.kv_cache_config.kv_cache_groups:
        caches = [context[name].kv_cache for name in group.layer_names]
        groups.append([[c] if hasattr(c, "shape") else list(c) for c in caches])
    return groups


def digests(worker, chunks: Any, spans: list[int]) -> Digests:
    """Of the blocks of a store or a load, by group and place; null blocks are left out."""
    import torch

    result = {}
    for number, (group, blocks) in enumerate(zip(layers(worker), chunks.blocks, strict=True)):
        for place, block in enumerate(blocks, chunks.start // spans[number]):
            if block:
                result[number, place] = [
                    hashlib.sha256(
                        t[block].contiguous().view(torch.uint8).cpu().numpy().tobytes()
                    ).hexdigest()
                    for layer in group
                    for t in layer
                ]
    return result


def watch(worker, stored: Seen, loaded: Seen) -> None:
    """Call with a store's chunks when it begins, and with a load's when vLLM hears that it ended.

    Each call has the digests of their blocks too. Of a load that failed there is no call.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_xpu.model.kv_cache_groups import block_tokens

    connector = get_kv_transfer_group()
    transfers, spans = connector.worker_half.transfers, block_tokens(connector._kv_cache_config)
    store, load, ended = transfers.store, transfers.load, connector.worker_half.take_ended
    ask, take = transfers.in_steps.ask, transfers.in_steps.take
    loading, inside = {}, []

    def submit_store(chunks: Any, *args: Any) -> Any:
        stored(chunks, digests(worker, chunks, spans))
        return store(chunks, *args)

    def submit_load(chunks: Any, *args: Any) -> Any:
        loading[chunks.request_id] = chunks
        return load(chunks, *args)

    def take_ended() -> Any:
        names, failed = ended()
        for name in names - failed:
            chunks = loading.pop(name)
            loaded(chunks, digests(worker, chunks, spans))
        return names, failed

    def ask_in_step(chunks: Any) -> None:
        inside.append(chunks)
        ask(chunks)

    def take_unfilled() -> Any:
        unfilled = take()
        for chunks in inside:
            if not unfilled:
                loaded(chunks, digests(worker, chunks, spans))
        inside.clear()
        return unfilled

    transfers.store, transfers.load = submit_store, submit_load
    transfers.in_steps.ask, transfers.in_steps.take = ask_in_step, take_unfilled
    connector.worker_half.take_ended = take_ended


def keep(worker) -> None:
    """Keep digests of what is stored and of what was loaded."""
    watch(
        worker, lambda _, blocks: computed.update(blocks), lambda _, blocks: brought.update(blocks)
    )


def zero_all(worker) -> None:
    for group in layers(worker):
        for layer in group:
            for tensor in layer:
                tensor.zero_()


def wait_until_idle(engine: Engine) -> None:
    end = time.monotonic() + 20
    while engine.llm.collective_rpc(is_busy)[0] and time.monotonic() < end:
        time.sleep(0.05)


def is_busy(worker) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_half.transfers.busy


def ask(
    engine: Engine, length: int, question: int, tokens: int = QUESTION, **salt: str
) -> tuple[list[int], int]:
    """Ask about a document with an empty cache; the answer, and the tokens that were hit."""
    engine.llm.reset_prefix_cache()
    engine.llm.collective_rpc(zero_all)
    before = engine.external_hits()
    answer = engine.ask(prompt(length) + prompt(tokens + question)[:tokens], **salt)
    wait_until_idle(engine)
    return answer, engine.external_hits() - before


def look(engine: Engine) -> dict[str, Any]:
    engine.llm.collective_rpc(keep)
    report: dict[str, Any] = {"blocks": blocks(engine.llm), "prompts": {}}
    for length in DOCUMENTS:
        answer, _ = ask(engine, length, 2, cache_salt="computed")
        computed.clear()
        brought.clear()
        _, first = ask(engine, length, 1)
        of_computed = dict(computed)
        again, hit = ask(engine, length, 2)
        _, same = ask(engine, length, 1)
        different = [key for key in brought if of_computed.get(key) != brought[key]]
        report["prompts"][str(length)] = {
            "first": first,
            "hit": hit,
            "same prompt": same,
            "same answer": again == answer,
            "compared": {n: sum(key[0] == n for key in brought) for n in {k[0] for k in brought}},
            "different": different,
        }
    whole = [ask(engine, STEP, 0, 0) for _ in range(2)]
    report["a prompt of whole chunks"] = {
        "hit": whole[1][1],
        "same answer": whole[0][0] == whole[1][0],
    }
    report["long questions"] = [
        ask(engine, DOCUMENTS[0], number, LONG_QUESTION, cache_salt="long")[1]
        for number in range(3)
    ]
    engine.llm.collective_rpc(break_loads)
    brought.clear()
    ask(engine, DOCUMENTS[-1], 1)
    different = {key[0] for key in brought if of_computed.get(key) != brought[key]}
    report["groups of a planted fault"] = sorted(different)
    engine.llm.collective_rpc(fail_loads)
    again, hit = ask(engine, DOCUMENTS[-1], 2)
    report["after a failed load"] = {"promised": hit, "same answer": again == answer}
    report["ways"] = {way: count for way, count in ways(None).items() if count}
    return report


def break_loads(worker: Any, groups: slice = slice(None), blocks: slice = slice(None)) -> None:
    """From now on, half of each block that is loaded is zero; of these groups, or of a piece's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for copies in get_kv_transfer_group().worker_half.transfers.groups[groups]:
        for part in copies.parts:

            def load(
                pieces: Any,
                *args: Any,
                view: Any = part.stager.view,
                real: Any = part.stager.load,
                **options: Any,
            ) -> Any:
                done = real(pieces, *args, **options)
                for piece in pieces:
                    rows = piece.rows.chunks(piece.chunks.start, piece.chunks.stop).engine
                    for (page,) in view.tensors:
                        page[rows[blocks], ..., : page.shape[-1] // 2] = 0
                return done

            part.stager.load = load


def fail_loads(worker) -> None:
    """From now on, each load ends with an error."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def load(*args: Any, **options: Any) -> Any:
        raise RuntimeError("planted")

    get_kv_transfer_group().worker_half.transfers.groups[-1].parts[-1].stager.load = load


def blocks(llm: Any) -> int:
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


def main(kind: str, model: str, url: str, loads: str) -> dict[str, Any]:
    sys.path.append(str(TEXT_ALONE))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(TEXT_ALONE)])
    from vllm import LLM

    options = {
        "block_size": 128,
        "max_model_len": 4096,
        # Both questions have the first step in common, which no chunk or window is as long as.
        "max_num_batched_tokens": STEP,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
        **KINDS[kind],
    }
    plain = LLM(model, skip_tokenizer_init=True, **options)
    without = blocks(plain)
    plain.llm_engine.engine_core.shutdown()
    settings = {"cache": "server", "server_url": url} if "://" in url else {}
    settings |= {"loads": loads}
    if KINDS[kind] is STATES and "://" not in url:  # chunks of a block, as `serve` has them
        settings["chunk_tokens"] = 128
    engine = Engine(model, None, "standard", settings=settings, skip_tokenizer_init=True, **options)
    return {"blocks without": without, **engine.close_after(look)}


if __name__ == "__main__":
    end_with(lambda: main(*sys.argv[1:]))
