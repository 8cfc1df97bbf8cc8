"""What an fp8 tier changes in the answers of a real engine: hits beside what was computed.

    PYTHONPATH=src:tests python -m support.fp8_probe MODEL TIER_DTYPE DTYPE PROMPTS

Each prompt is text, asked for twice: computed, and hit with the engine's own cache zeroed between.
Compared are the logprobs of all tokens behind the prompt, and the likeliest 24 tokens. Run by
engine/test_fp8.py; prints a JSON object last.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from support.probes import end_with
from support.real_engine import CHUNK, Engine
from support.server_workers import busy, wait_for

from lmcache_xpu.harness.random_model import corpus

LENGTH = 4 * CHUNK + 16  # tokens of a prompt
TOP = 20  # of the likeliest tokens


def texts(model: str, count: int) -> list[list[int]]:
    """Return prompts, which share nothing."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(Path(model, "tokenizer.json"))).encode(corpus()).ids
    return [tokens[first : first + LENGTH] for first in range(0, count * LENGTH, LENGTH)]


def asked(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """Ask for a prompt from an empty cache of the engine's own, and again for an answer from it."""
    from vllm import SamplingParams

    def ask(**options: Any) -> Any:
        sampling = SamplingParams(temperature=0, ignore_eos=True, **options)
        prompt = {"prompt_token_ids": tokens}
        return engine.llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]

    engine.forget()
    before = engine.external_hits()
    [logprobs] = ask(max_tokens=1, logprobs=-1).logprobs
    hit = engine.external_hits() - before
    wait_for(engine, busy, until=False)
    first = {token: each.logprob for token, each in logprobs.items()}
    return {"hit": hit, "logprobs": first, "answer": list(ask(max_tokens=24).token_ids)}


def compared(cold: dict[str, Any], warm: dict[str, Any]) -> dict[str, Any]:
    """Return how far the first tokens' distributions and the answers of two runs are apart."""
    was, now = cold["logprobs"], warm["logprobs"]
    best = sorted(was, key=was.__getitem__, reverse=True)
    pairs = zip(cold["answer"], warm["answer"], strict=True)
    return {
        "hit": warm["hit"],
        "top": statistics.fmean(abs(was[each] - now[each]) for each in best[:TOP]),
        "likeliest": abs(was[best[0]] - now[best[0]]),
        "divergence": sum(math.exp(was[each]) * (was[each] - now[each]) for each in was),
        "first_same": cold["answer"][0] == warm["answer"][0],
        "same": next((n for n, (a, b) in enumerate(pairs) if a != b), len(cold["answer"])),
    }


def look(model: str, tier_dtype: str, dtype: str, prompts: str) -> dict[str, Any]:
    """Ask for all prompts twice, and sum up."""
    settings = {"tier_dtype": tier_dtype, "save_decode": False}
    engine = Engine(model, None, "standard", settings=settings, dtype=dtype, max_logprobs=-1)
    rows = [
        compared(asked(engine, each), asked(engine, each)) for each in texts(model, int(prompts))
    ]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    least = {"most_divergence": max(row["divergence"] for row in rows)}
    return {"hits": sorted({row["hit"] for row in rows}), "mean": mean, **least}


if __name__ == "__main__":
    end_with(lambda: look(*sys.argv[1:]))
