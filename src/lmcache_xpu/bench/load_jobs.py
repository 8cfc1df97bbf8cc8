"""The loads in an engine of this process: requests arrive by the clock, steps go on and on.

The engine's step, which decodes and loads, is what is measured. A server around it would add its
own time to each token.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from lmcache_xpu.bench.engine import Engine
    from lmcache_xpu.bench.load import Conversations, Decoding, Sharing

__all__ = ["Spread", "converse", "decode", "share"]

STORE_S = 2.0  # stores go on after an answer
PERCENTILES_FROM = 20  # fewer values have a median and a largest one


class Spread(TypedDict):
    """How values are spread, milliseconds; None where there are too few for a percentile."""

    n: int
    mean: float
    p50: float
    p90: float | None
    p99: float | None
    max: float


@dataclass(slots=True)
class Request:
    """A request and the times of its tokens, seconds from the load's begin.

    Args:
        prompt: its tokens.
        tokens: length of its answer.
        at_s: when it arrives.
        round: of its conversation, from 0.
        times: when its tokens came.
        answer: tokens of the answer so far.
    """

    prompt: list[int]
    tokens: int
    at_s: float = 0.0
    round: int = 0
    times: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Time to first token, from when it was due."""
        return (self.times[0] - self.at_s) * 1e3

    def gaps_ms(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Return the times between its tokens within a part of the load."""
        pairs = itertools.pairwise(self.times)
        return [(b - a) * 1e3 for a, b in pairs if a >= begin_s and b <= end_s]


def drive(
    engine: Engine,
    requests: Iterable[Request],
    answered: Callable[[Request, float], Request | None] = lambda *_: None,
) -> float:
    """Ask requests when they are due; return the seconds until the last one has its answer.

    `answered` takes each request that has ended, and the time; it may return one that follows.
    """
    order = itertools.count()  # of requests that are due at the same time
    waiting = [(request.at_s, next(order), request) for request in requests]
    heapq.heapify(waiting)
    running: dict[str, Request] = {}
    begin = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - begin
        while waiting and waiting[0][0] <= now:
            _, _, request = heapq.heappop(waiting)
            running[engine.add(request.prompt, request.tokens)] = request
        if not running:
            time.sleep(waiting[0][0] - now)
            continue
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            request = running[output.request]
            request.times += [now] * bool(output.tokens)
            request.answer += output.tokens
            if output.finished:
                del running[output.request]
                if following := answered(request, now):
                    heapq.heappush(waiting, (following.at_s, next(order), following))
    return time.perf_counter() - begin


def decode(engine: Engine, load: Decoding, *, keeps: bool = False) -> dict[str, Spread | float]:
    """Time what decodes, alone and while hits arrive, and the hits.

    Without a tier, and with `new`, the hits are prompts that are computed; with `keeps` they are in
    the engine's own cache. Latencies count while all requests decode, until the last hit's answer.

    Returns:
        inter-token latencies `alone` and `with hits`, `ttft` of the hits, and the tokens a second
        that were decoded, `tokens_s alone` and `tokens_s with hits`.
    """
    histories = [engine.prompt(load.hit.history) for _ in range(load.hits)]
    if not load.new:
        for history in histories:
            engine.seconds(history)
    time.sleep(STORE_S)
    figures: dict[str, Spread | float] = {}
    for name, arriving in (("alone", []), ("with hits", histories)):
        if not keeps:
            engine.forget()
        decoding = [Request(engine.prompt(load.prompt), load.tokens) for _ in range(load.requests)]
        hits = [
            Request(history + engine.prompt(load.hit.new), load.answer, (at + 1) * load.every_s)
            for at, history in enumerate(arriving)
        ]
        drive(engine, [*decoding, *hits])
        begin = max(request.times[0] for request in decoding)
        end = min(request.times[-1] for request in decoding)
        if hits:
            end = min(end, max(hit.times[-1] for hit in hits))
        gaps = [gap for request in decoding for gap in request.gaps_ms(begin, end)]
        figures[name] = spread(gaps)
        figures[f"tokens_s {name}"] = len(gaps) / (end - begin)
        if hits:
            figures["ttft"] = spread([hit.ttft_ms for hit in hits])
    return figures


def converse(engine: Engine, load: Conversations) -> dict[str, Spread | float]:
    """Time conversations at once, whose histories are new at the first request.

    Returns:
        `requests_s`, requests a second; `first` and `later`, the time to first token of the first
        and of later rounds; `itl`, inter-token latencies.
    """
    later: list[Request] = []

    def answered(request: Request, now: float) -> Request | None:
        if (number := request.round + 1) == load.rounds:
            return None
        prompt = request.prompt + request.answer + engine.prompt(load.new)
        later.append(Request(prompt, load.answer, now + load.pause_s, number))
        return later[-1]

    engine.forget()
    prompts = [engine.prompt(load.history + load.new) for _ in range(load.users)]
    first = [
        Request(prompt, load.answer, user * load.apart_s) for user, prompt in enumerate(prompts)
    ]
    seconds = drive(engine, first, answered)
    return {
        "requests_s": load.users * load.rounds / seconds,
        "first": spread([request.ttft_ms for request in first]),
        "later": spread([request.ttft_ms for request in later]),
        "itl": spread([gap for request in first + later for gap in request.gaps_ms()]),
    }


def share(engine: Engine, load: Sharing, *, tier: bool) -> dict[str, Spread | float]:
    """Time requests at once that begin alike: their history in the engine's own cache, in the tier.

    Returns:
        `own` and `tier`, the times to first token; `own s` and `tier s`, seconds until all ended.
    """
    history = engine.prompt(load.history)
    engine.seconds(history)
    figures: dict[str, Spread | float] = {}
    for place in ("own", "tier")[: 1 + tier]:
        time.sleep(STORE_S)
        if place == "tier":
            engine.forget()
        prompts = [history + engine.prompt(load.new) for _ in range(load.requests)]
        requests = [Request(prompt, load.answer) for prompt in prompts]
        figures[f"{place} s"] = drive(engine, requests)
        figures[place] = spread([request.ttft_ms for request in requests])
    return figures


def spread(values: list[float]) -> Spread:
    """Return how values are spread."""
    many = len(values) >= PERCENTILES_FROM
    hundredths = statistics.quantiles(values, n=100, method="inclusive") if many else []
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "p50": statistics.median(values),
        "p90": hundredths[89] if many else None,
        "p99": hundredths[98] if many else None,
        "max": max(values),
    }
