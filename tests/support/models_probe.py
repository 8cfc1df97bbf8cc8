"""A real vLLM on CPU with other models, several workers, and drafters.

Run by engine/test_models.py, with the arguments CASE MODEL DIRECTORY OPTIONS, where OPTIONS is a
JSON object of vLLM's. Prompts are computed, forgotten, and hit; prints a JSON object last. Several
workers have a server in the directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.probes import end_with
from support.real_engine import CHUNK, LENGTHS, Engine, digests, prompt, restored
from support.server_workers import busy, wait_for

LONGEST = 4096


def fallbacks(worker: Any) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("lmcache_xpu_fallbacks_total", {"reason": "load"}) or 0.0


def hit(engine: Engine, length: int, said: int = 0) -> dict[str, Any]:
    """Compute a prompt and hit it; see engine/test_models.py for what is expected.

    Args:
        engine: which is asked.
        length: of the prompt.
        said: tokens of the answer that are part of the second prompt.
    """
    engine.forget()
    tokens = prompt(length)
    computed = engine.ask(tokens)
    cold = engine.llm.collective_rpc(digests)
    wait_for(engine, busy, until=False)
    engine.forget()
    before, missed = engine.external_hits(), sum(engine.llm.collective_rpc(fallbacks))
    answer = engine.ask(tokens + computed[:said])
    left = len(computed) - said
    warm = engine.llm.collective_rpc(digests)
    return {
        "computed": computed[said:],
        "answer": answer[:left],
        "hit": engine.external_hits() - before,
        "restored": [restored(*both) for both in zip(cold, warm, strict=True)],  # by worker
        "layers": [len(layers) for layers in warm],
        "missed": sum(engine.llm.collective_rpc(fallbacks)) - missed,
    }


def hits(engine: Engine, case: str) -> dict[str, Any]:
    if case.startswith("mla"):
        # vLLM's MLA on CPU rounds a prompt's tokens otherwise than an answer's: the second prompt
        # leaves one token to compute, which was an answer's before as well.
        return {str(chunks): hit(engine, chunks * CHUNK, said=1) for chunks in (3, 4)}
    report = {name: hit(engine, length) for name, length in LENGTHS.items()}
    if case == "eagle":
        # vLLM leaves the drafter out of the last step: it could not propose so many tokens.
        report["longest"] = hit(engine, LONGEST - 1)
        report["not waited for"] = without_waiting(engine)
    return report


def without_waiting(engine: Engine) -> dict[str, Any]:
    """A hit in an engine that does not wait for the model's layers before it computes them."""
    from lmcache_xpu.connector.connector import LMCacheXPUServerConnector as Connector

    wait = Connector.wait_for_layer_load
    Connector.wait_for_layer_load = lambda self, name: None
    try:
        return hit(engine, 5 * CHUNK)  # that no case asked for before
    finally:
        Connector.wait_for_layer_load = wait


def probe(engine: Engine, case: str) -> dict[str, Any]:
    prompts = hits(engine, case)
    drafting = engine.llm.llm_engine.vllm_config.speculative_config is not None
    drafted = engine.counter("spec_decode_num_draft_tokens") if drafting else 0
    return {"prompts": prompts, "drafted": drafted}


def main(case: str, model: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    if "tensor_parallel_size" not in options:
        return Engine(model, None, "standard", **options).close_after(probe, case)
    server = CacheServer(directory / "server.log")
    server.start()
    try:
        settings = {"cache": "server", "server_url": server.url, "loads": "auto"}
        engine = Engine(model, None, "standard", settings=settings, **options)
        return engine.close_after(probe, case)
    finally:
        server.kill()


if __name__ == "__main__":
    case, model, directory, options = sys.argv[1:]
    end_with(lambda: main(case, model, Path(directory), json.loads(options)))
