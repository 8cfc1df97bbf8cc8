"""The jobs of the bench, which an engine's process does; see `engine`.

Under load requests arrive by the clock. The engine's step, which decodes and loads, is what is
measured: a server around it would add its own time to each token.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_xpu.bench.engine import Engine

Job = Callable[["Engine"], Any]  # sent to the engine's process, and its answer back: both pickled
Figures = dict[str, float]  # of one round, by the words over a table's column

STORE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history
PERCENTILES_FROM = 20  # fewer values have a median and a largest one


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are asked at once: tokens that are cached, then tokens that are not."""

    history: int  # cached tokens of each
    new: int = 0  # other tokens of each; 0 for whole prompts, 1 or more for later turns
    count: int = 1  # number of prompts

    def __str__(self) -> str:
        each = f"{self.history} + {self.new}" if self.new else f"{self.history}"
        return each if self.count == 1 else f"{self.count} x ({each})"

    @property
    def title(self) -> str:
        """The words over a table."""
        return f"Prompts of {self} tokens, ms"

    def measure(self, engine: Engine) -> list[Figures]:
        """Time them, later turns several times.

        Returns milliseconds to the first token of all, with histories in the engine's own cache
        (`own prefix`) and in the `tier`, if any; of whole prompts also when they are new
        (`recompute`).
        """
        histories = [engine.prompt(self.history) for _ in range(self.count)]
        recompute_ms = engine.seconds(*histories) * 1e3
        rounds = []
        for _ in range(TURN_REPEATS if self.new else 1):
            ms = {} if self.new else {"recompute": recompute_ms}
            for place in ("own prefix", "tier") if engine.hits == "tier" else ("own prefix",):
                time.sleep(STORE_S / 2)
                if place == "tier":
                    engine.forget()
                asked = [history + engine.prompt(self.new) for history in histories]
                ms[place] = engine.seconds(*asked) * 1e3
            rounds.append(ms)
        return rounds


def warm_up(engine: Engine, length: int) -> None:
    """Compute a prompt: kernels are compiled at first use."""
    engine.seconds(engine.prompt(length))


def exactness(engine: Engine, length: int) -> float:
    """Return the share of blocks, in all layers, that a hit in the tier restores to the byte."""
    prompt = engine.prompt(length)
    engine.forget()
    engine.zero()
    cold = engine.written(prompt)
    time.sleep(STORE_S)
    engine.forget()
    engine.zero()
    warm = engine.written(prompt)
    both = cold.keys() & warm.keys()
    pairs = (zip(cold[key], warm[key], strict=True) for key in both)  # of layers
    return statistics.fmean(a == b for a, b in itertools.chain.from_iterable(pairs))


def link_gb_s(_engine: Engine, repeats: int, devices: int) -> dict[str, float]:
    """Time one large copy from pinned memory (on CPU: a plain copy) and back; GB/s.

    So many devices copy at the same time; the rate is that of all together, a median.
    """
    import torch

    from lmcache_xpu.bench.engine import synchronize

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    size = 2**30 if device else 2**28
    names = [f"{device.type}:{number}" for number in range(devices)] if device else ["cpu"]
    hosts = [torch.ones(size, dtype=torch.uint8, pin_memory=device is not None) for _ in names]
    on_devices = [torch.ones(size, dtype=torch.uint8, device=name) for name in names]
    rates = {}
    for name, targets, sources in (("load", on_devices, hosts), ("store", hosts, on_devices)):
        times = []
        for _ in range(repeats + 2):
            synchronize(devices)
            begin = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            synchronize(devices)
            times.append(time.perf_counter() - begin)
        rates[name] = len(names) * size / sorted(times)[len(times) // 2] / 1e9
    return rates


@dataclass(slots=True)
class Request:
    """A request and the times of its tokens, seconds from the load's begin."""

    prompt: list[int]  # its tokens
    tokens: int  # length of its answer
    at_s: float = 0.0  # when it arrives
    round: int = 0  # of its conversation, from 0
    times: list[float] = field(default_factory=list)  # when its tokens came
    answer: list[int] = field(default_factory=list)  # tokens of the answer so far

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
    waiting = sorted(requests, key=lambda request: request.at_s)
    running: dict[str, Request] = {}
    begin = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - begin
        while waiting and waiting[0].at_s <= now:
            request = waiting.pop(0)
            running[engine.add(request.prompt, request.tokens)] = request
        if not running:
            time.sleep(waiting[0].at_s - now)
            continue
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            request, tokens = running[output.request_id], output.outputs[0].token_ids
            request.times += [now] * bool(tokens)
            request.answer += tokens
            if output.finished:
                del running[output.request_id]
                if following := answered(request, now):
                    bisect.insort(waiting, following, key=lambda request: request.at_s)
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Requests that decode, alone at first, and then beside others that arrive one by one."""

    requests: int  # how many decode at once
    prompt: int  # tokens of each one's prompt
    tokens: int  # of each one's answer
    hits: int  # how many arrive
    hit: Prompts  # each of these
    every_s: float  # seconds between two of them
    answer: int = 4  # tokens of a hit's answer
    new: bool = False  # whether what arrives is no hit, but computed and stored

    @property
    def title(self) -> str:
        """The words over a table."""
        cached = "computed and stored" if self.new else f"of which {self.hit.history} are cached"
        return (
            f"{self.requests} requests decode; every {self.every_s:g} s a prompt of {self.hit} "
            f"tokens arrives, {cached}. Inter-token latencies, and TTFT of these prompts, ms"
        )

    def measure(self, engine: Engine) -> list[Figures]:
        """Time what decodes, `alone` and `with hits` that arrive, and the hits' `TTFT`.

        Without a tier, and with `new`, the hits are prompts that are computed. Latencies count
        while all requests decode, until the last hit's answer.
        """
        histories = [engine.prompt(self.hit.history) for _ in range(self.hits)]
        if not self.new:
            for history in histories:
                engine.seconds(history)
        time.sleep(2 * STORE_S)
        figures: Figures = {}
        for name, arriving in (("alone", []), ("with hits", histories)):
            if engine.hits != "own cache":
                engine.forget()
            decoding = [
                Request(engine.prompt(self.prompt), self.tokens) for _ in range(self.requests)
            ]
            hits = [
                Request(history + engine.prompt(self.hit.new), self.answer, number * self.every_s)
                for number, history in enumerate(arriving, 1)
            ]
            drive(engine, [*decoding, *hits])
            begin = max(request.times[0] for request in decoding)
            end = min(request.times[-1] for request in decoding)
            if hits:
                end = min(end, max(hit.times[-1] for hit in hits))
                figures |= spread("TTFT", [hit.ttft_ms for hit in hits])
            gaps = [gap for request in decoding for gap in request.gaps_ms(begin, end)]
            figures |= spread(name, gaps)
            figures[f"tokens/s {name}"] = len(gaps) / (end - begin)
        return [figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Users that ask at once, each of them round after round."""

    users: int  # how many
    rounds: int  # requests of each
    history: int  # tokens before the first request
    new: int  # tokens of each request
    answer: int  # tokens of each answer
    apart_s: float  # seconds between the first requests of two users
    pause_s: float = 0.05  # seconds from an answer to the next request

    @property
    def title(self) -> str:
        """The words over a table."""
        return (
            f"{self.users} conversations at once: {self.history} tokens, then {self.rounds} rounds "
            f"of {self.new} new ones and {self.answer} of answer. TTFT and ITL, ms"
        )

    def measure(self, engine: Engine) -> list[Figures]:
        """Time the conversations, whose histories are new in the `first` round."""
        later: list[Request] = []

        def answered(request: Request, now: float) -> Request | None:
            if (number := request.round + 1) == self.rounds:
                return None
            prompt = request.prompt + request.answer + engine.prompt(self.new)
            later.append(Request(prompt, self.answer, now + self.pause_s, number))
            return later[-1]

        engine.forget()
        first = [
            Request(engine.prompt(self.history + self.new), self.answer, user * self.apart_s)
            for user in range(self.users)
        ]
        seconds = drive(engine, first, answered)
        gaps = [gap for request in first + later for gap in request.gaps_ms()]
        return [
            {
                "requests/s": self.users * self.rounds / seconds,
                **spread("TTFT, first", [request.ttft_ms for request in first]),
                **spread("TTFT, later", [request.ttft_ms for request in later]),
                **spread("ITL", gaps),
            }
        ]


def spread(name: str, values: list[float]) -> Figures:
    """Return the median and the largest of values, and a percentile where there are enough."""
    figures = {f"{name} p50": statistics.median(values)}
    if len(values) >= PERCENTILES_FROM:
        figures[f"{name} p99"] = statistics.quantiles(values, n=100, method="inclusive")[98]
    return figures | {f"{name} max": max(values)}
