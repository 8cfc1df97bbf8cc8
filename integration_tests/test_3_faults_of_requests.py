"""Requests that end early, are too large or give way leave nothing behind."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat, takewhile

import pytest
from engine import CHUNK, Engine
from hits import CPU_CHUNKS, fill
from leftovers import CLEAN, leaks
from prompts import tokens

pytestmark = pytest.mark.promise("4 faults")


@pytest.mark.fails_without("finished", "references")
def test_a_client_that_hangs_up_leaves_nothing(small: Engine):
    """While its prompt waits, loads or is answered: five at a time, where four fit.

    Seen to fail when nobody unpins what one that waited had looked up, and with references kept.
    """
    engine = small
    prompts = [tokens(("hangs up", number), 2500) for number in range(5)]
    expected = engine.recompute(prompts[0]).token_ids
    for prompt in prompts:
        engine.ask(prompt, 1)
    for wait_s in (0.0, 0.01, 0.03, 0.1):
        engine.forget()
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(hang_up, repeat(engine), prompts, repeat(wait_s)))
    engine.forget()
    # On a busy machine the first may have ended before the last has its load: then once more.
    tries = (room_is_taken(engine, prompts) for _ in range(6))
    gauges = list(takewhile(lambda gauges: gauges != (4, 1), tries))
    assert len(gauges) < 6, f"running and waiting at most: {gauges}"
    time.sleep(1)
    engine.forget()
    assert engine.ask(prompts[0]).token_ids == expected
    assert leaks(engine) == CLEAN


def hang_up(engine: Engine, prompt: list[int], wait_s: float) -> None:
    with engine.answering(prompt):
        time.sleep(wait_s)


def room_is_taken(engine: Engine, prompts: list[list[int]]) -> tuple[int, int]:
    """How many ran, of four with long answers, and whether a fifth waited beside them."""
    with contextlib.ExitStack() as running:
        for prompt in prompts[:4]:
            running.enter_context(engine.answering(prompt, 1500))
        ran = engine.reaches("vllm:num_requests_running", 4, 10)
        with engine.answering(prompts[4]):  # looked up, and waits for their room
            return ran, engine.reaches("vllm:num_requests_waiting", 1, 3)


@pytest.mark.fails_without("blocks", "references")
def test_a_cpu_tier_too_small_for_a_request_stores_what_fits(small: Engine):
    """16 chunks at a time do not fit with what is being written; nothing waits for ever.

    Seen to fail with loads that leave out a block, and with references kept.
    """
    engine = small
    prompt = tokens("large", 4096 - 16)
    expected = engine.recompute(prompt).token_ids
    for _ in range(3):
        engine.forget()
        assert engine.ask(prompt).token_ids == expected
    fill(engine, "after the large one", CPU_CHUNKS)
    engine.forget()
    assert engine.ask(prompt).token_ids == expected
    assert leaks(engine) == CLEAN


@pytest.mark.fails_without("computed", mode="layerwise")
def test_a_request_for_prompt_logprobs_may_be_preempted(small: Engine):
    """It arrives last, finds three that leave it little room, and has to give way to them.

    Seen to fail when LMCache's own engine looks it up: an assertion of its ends the engine.
    """
    engine = small
    prompt = tokens("logprobs", 4 * CHUNK + 77)
    expected = engine.recompute(prompt, 120).token_ids
    engine.ask(prompt, 1)
    engine.forget()
    # On a busy machine the three may have ended before the last arrives: then once more.
    tries = (gives_way(engine, prompt, expected) for _ in range(6))
    assert any(tries), "nobody was preempted in six tries"
    assert engine.alive()


def gives_way(engine: Engine, prompt: list[int], expected: tuple[int, ...]) -> bool:
    """Whether somebody was preempted while it was answered, rightly, beside three long answers."""
    before = engine.metrics().sum("vllm:num_preemptions_total")
    with contextlib.ExitStack() as stack:
        # 28 blocks each, 30 at the end; with the prompt's 9 all but two of 95 are taken.
        others = [tokens(("beside", number), 28 * 128 - 64) for number in range(3)]
        beside = [stack.enter_context(engine.answering(other, 250)) for other in others]
        engine.reaches("vllm:num_requests_running", 3, 10)
        assert engine.ask(prompt, 120, prompt_logprobs=0).token_ids == expected
        assert all('"finish_reason":"length"' in answer.read().decode() for answer in beside)
    return engine.metrics().sum("vllm:num_preemptions_total") > before
