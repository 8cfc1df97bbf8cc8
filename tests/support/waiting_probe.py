"""A real vLLM on CPU whose requests wait for their loads: what may happen meanwhile.

Run by engine/test_waiting.py, with the arguments MODEL RUNNER. Prints a JSON object last.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from typing import Any

from prometheus_client import REGISTRY
from support import newer_runner
from support.engine_tiers import local, locks, settle
from support.probes import end_with
from support.real_engine import BLOCK, CHUNK, Engine, hit, prompt

TURNS = 8  # requests at once that share a history
HELD_STEPS = 30  # while a load is held
PAUSES, HOUR_S = 4, 3600.0


class Loads:
    """Holds loads beside steps before they begin, and counts them."""

    def __init__(self) -> None:
        from lmcache_xpu.copies.moves import Moves

        self.open = threading.Event()
        self.open.set()
        self.count = 0
        load = Moves.load

        def held(moves: Any, *args: Any) -> None:
            self.count += 1
            self.open.wait(30)
            load(moves, *args)

        Moves.load = held


class Asked:
    """Requests that are computed step by step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine.llm.llm_engine
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}

    def add(self, name: str, tokens: list[int], answer: int = 24) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.answers[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.reasons[output.request_id] = output.outputs[0].finish_reason

    def finish(self) -> None:
        deadline = time.monotonic() + 60
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline:
            self.step()


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def stored(engine: Engine, tokens: list[int]) -> list[int]:
    """The right answer; what it takes is in the tier afterwards, and nowhere else."""
    engine.forget()
    answer = engine.ask(tokens)
    settle(engine)
    engine.forget()
    return answer


def policy_of(engine: Engine) -> Any:
    return scheduler(engine).connector.scheduler_half.policy


def holding(engine: Engine, loads: Loads, tokens: list[int]) -> dict[str, Any]:
    """A load that is slow: others decode, and a reset says that it can't be now."""
    right = stored(engine, tokens)
    asked = Asked(engine)
    asked.add("other", prompt(40), answer=60)
    asked.step(5)
    loads.open.clear()
    asked.add("held", tokens)
    before = len(asked.answers["other"])
    asked.step(HELD_STEPS)
    computed = len(asked.answers["other"]) - before
    waiting = "held" not in asked.answers
    reset = engine.llm.reset_prefix_cache()
    loads.open.set()
    asked.finish()
    return {
        "others computed": computed,
        "waits": waiting,
        "reset": reset,
        "right": asked.answers["held"] == right,
        "reset afterwards": engine.llm.reset_prefix_cache(),
    }


def aborted(engine: Engine, loads: Loads, tokens: list[int]) -> dict[str, Any]:
    """A request that is aborted while it waits; its blocks are kept until the load has ended."""
    right = stored(engine, tokens)
    pool = scheduler(engine).kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    asked = Asked(engine)
    asked.add("other", prompt(41), answer=30)
    asked.step(3)
    loads.open.clear()
    asked.add("aborted", tokens)
    asked.step(3)
    asked.engine.abort_request(["aborted"])
    asked.step(3)
    kept = free - pool.get_num_free_blocks()
    loads.open.set()
    asked.finish()
    asked.add("last", prompt(42), answer=8)  # steps, in which vLLM hears of the load
    asked.finish()
    free_again = engine.llm.reset_prefix_cache() and pool.get_num_free_blocks() == free
    return {
        "blocks kept": kept,
        "free again": bool(free_again),
        "answered": "aborted" in asked.answers,
        "right": engine.ask(tokens) == right,
    }


def shared(engine: Engine, loads: Loads) -> dict[str, Any]:
    """Turns at once that share a history in the tier: it is loaded once."""
    history = prompt(4 * CHUNK)
    turns = [history + prompt(50 + number) for number in range(TURNS)]
    right = [stored(engine, tokens) for tokens in turns]
    stored(engine, history)
    asked, loads.count = Asked(engine), 0
    asked.add("other", prompt(43), answer=40)
    asked.step(3)
    for number, tokens in enumerate(turns):
        asked.add(f"turn {number}", tokens)
    asked.finish()
    return {
        "loads": loads.count,
        "right": [asked.answers[f"turn {number}"] for number in range(TURNS)] == right,
    }


def failing(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """A chunk that is lost between look-up and load, then all of them."""
    cache = local()
    read = cache._storage.unsafe_read
    report = {}
    for fault, kept in (("a chunk lost", 2), ("all lost", 0)):
        right = stored(engine, tokens)
        lost: list[int] = []

        def lossy(keys: Any, kept: int = kept, lost: list[int] = lost) -> Any:
            there, objects = read(keys)
            lost.append(len(there) - kept)
            cache._room.unlock(there[kept:])
            return there[:kept], objects[:kept]

        cache._storage.unsafe_read = lossy
        asked = Asked(engine)
        asked.add("other", prompt(44), answer=30)
        asked.step(3)
        asked.add("failing", tokens)
        asked.finish()
        del cache._storage.unsafe_read
        settle(engine)
        report[fault] = {
            "lost": lost,
            "right": asked.answers.get("failing") == right,
            "reason": asked.reasons["failing"],
            "afterwards": stored(engine, tokens) == right == engine.ask(tokens),
        }
    return report


def chosen(engine: Engine, loads: Loads, tokens: list[int]) -> dict[str, Any]:
    """With a choice: alone a request does not wait, beside others it does."""
    from lmcache_xpu.connector.load_policy import LoadPolicy

    policy = policy_of(engine)
    assert isinstance(policy, LoadPolicy)
    policy.loads = "always"
    right = stored(engine, tokens)
    loads.count = 0
    alone = engine.ask(tokens) == right
    counted = {"alone": loads.count}
    engine.forget()
    policy._loaded_per_s = 1.0  # a link that no step could hide
    asked = Asked(engine)
    asked.add("other", prompt(45), answer=30)
    asked.step(3)
    asked.add("hit", tokens)
    asked.finish()
    return {**counted, "beside": loads.count, "right": alone and asked.answers["hit"] == right}


def counted() -> dict[str, float]:
    """What this process has counted of hits that were computed, and of stores."""
    hits = REGISTRY.get_sample_value("lmcache_xpu_loads_total", {"way": "computed"})
    store = {"direction": "store", "tier": "cpu"}
    stored_bytes = REGISTRY.get_sample_value("lmcache_xpu_bytes_total", store)
    return {"computed": hits or 0, "stored": stored_bytes or 0}


def computed(engine: Engine, loads: Loads, tokens: list[int]) -> dict[str, Any]:
    """With `auto`, and loads that take longer than computing: nothing is loaded, or stored again.

    Then, without a choice, all of it is still there.
    """
    policy = policy_of(engine)
    right = stored(engine, tokens)
    engine.ask(prompt(700))  # computing is measured by now
    settle(engine)
    engine.forget()
    usual, policy.loads = policy._tuning, "auto"
    policy._tuning = dataclasses.replace(usual, load_us=10**12)
    loads.count, before = 0, counted()
    answer = engine.ask(tokens)
    settle(engine)
    after, cold = counted(), engine.blocks()
    policy._tuning, policy.loads = usual, "always"
    engine.forget()
    return {
        "loads": loads.count,
        "more": {name: after[name] - before[name] for name in after},
        "right": answer == right,
        "hit": hit(engine, tokens, cold),
    }


def paused(engine: Engine) -> dict[str, Any]:
    """Hours without a request: what the longest step of few tokens took, as the policy has it.

    Before an hour comes the step in which vLLM's server tells its worker of the last answer. It has
    no tokens.
    """
    policy = policy_of(engine)
    hours = 0
    policy._clock = lambda: time.perf_counter() + hours * HOUR_S
    policy._small_steps_s.clear()
    asked = Asked(engine)
    for hours in range(PAUSES):
        asked.add(f"before hour {hours}", prompt(60 + hours), answer=8)
        asked.finish()
        asked.step()
    return {"small steps": len(policy._small_steps_s), "longest": max(policy._small_steps_s)}


def look(engine: Engine) -> dict[str, Any]:
    loads, tokens = Loads(), prompt(4 * CHUNK + BLOCK + 9)
    report = {
        "holding": holding(engine, loads, tokens),
        "aborted": aborted(engine, loads, tokens),
        "shared": shared(engine, loads),
        "chosen": chosen(engine, loads, tokens[: 4 * CHUNK + 1]),
        "computed": computed(engine, loads, tokens),
        "paused": paused(engine),
    }
    policy_of(engine).loads = "async"
    report["failing"] = failing(engine, tokens)
    scheduler(engine).recompute_kv_load_failures = False  # the policy `fail`
    report["failing, policy fail"] = failing(engine, tokens)
    settle(engine)
    return {**report, "locks": engine.llm.collective_rpc(locks)[0]}


if __name__ == "__main__":
    model, runner = sys.argv[1:]
    if runner == "newer":
        newer_runner.use()
    engine = functools.partial(Engine, model, None, "standard", settings={"loads": "async"})
    end_with(lambda: engine().close_after(look))
