"""What becomes of a hit: loaded inside its step, loaded while its request waits, or computed.

A load inside the step of its request, beside the layers, ends sooner. But all others in that step
wait for it as well. So a request waits for its load, while others are computed, where

    others      somebody else waits for a token, and
    too long    the load takes longer than the step would take without it

And it is computed where that takes no longer than the load: few tokens, which a step computes
beside others for nothing, or a slow disk.

How long steps take is measured here; the worker and look-ups report how fast loads are. Until then
a ratio stands for both, see `Tuning.loaded_per_computed`, and what can be loaded is not computed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from lmcache_xpu.transfer.tuning import Tuning

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Loads = Literal["auto", "always", "step", "async"]
LoadMode = Literal["step", "async", "computed"]

# Tokens of a step from which on they decide how long it takes, and up to which the weights do.
MANY_TOKENS, FEW_TOKENS = 512, 128
NEWEST = 0.25  # what the newest measurement counts in a mean
SMALL_STEPS, READS = 32, 5  # the last so many are remembered
STEPS_AHEAD = 8  # steps that vLLM schedules before the first has ended, at most
# So many hits are computed before one is loaded again: a disk may have become faster.
COMPUTED_IN_TURN = 16


class _Step(NamedTuple):
    number: int
    started_s: float
    tokens: int
    loads: bool


class LoadPolicy:
    """Chooses how the hits of one scheduler's requests are loaded, by what steps and loads take."""

    def __init__(self, tuning: Tuning, clock: Callable[[], float] = time.perf_counter) -> None:
        # `always` never computes a hit; `step` or `async` leaves no choice. It is `async` unless
        # vLLM's scheduler begins a request anew whose load inside a step failed.
        self.loads: Loads = "async"
        self._tuning = tuning
        self._clock = clock
        self._modes: dict[str, LoadMode] = {}  # of requests that are not in a step yet
        self._running: set[str] = set()  # requests of the last step
        self._waiting: set[str] = set()  # requests whose loads are beside steps
        self._numbers = itertools.count(1)
        self._steps: deque[_Step] = deque(maxlen=STEPS_AHEAD)
        self._ended_s = 0.0  # when the last step did
        self._loaded_per_s: float | None = None
        self._reads: deque[float] = deque(maxlen=READS)  # seconds for a token
        self._small_steps_s: deque[float] = deque(maxlen=SMALL_STEPS)
        self._large_tokens = self._large_s = 0.0  # of large steps, older ones counting less
        self._after_large = False  # the last step was one
        self._computed_in_turn = 0

    def choose(self, request: Request, kept: int, tokens: int) -> LoadMode:
        """Choose for a request that may be scheduled next; the last choice counts.

        So many `tokens` can be loaded beyond the `kept` ones of vLLM's own prefix cache.
        """
        name, computed = request.request_id, request.num_tokens - kept - tokens
        mode: LoadMode = "step"
        if self.computes(tokens, computed):
            mode = "computed"
        elif self.loads in ("step", "async"):
            mode = self.loads
        # A load inside a step would be behind those beside it, and hold its step up.
        elif not self.is_alone(name) and self.waits(tokens, computed):
            mode = "async"
        self._modes[name] = mode
        return mode

    def is_alone(self, request_id: str) -> bool:
        """Whether no other request was in the last step, or waits for its load."""
        return not (self._running - {request_id} or self._waiting)

    def finished(self, request_id: str) -> None:
        """Forget a request. A load beside steps goes on."""
        self._modes.pop(request_id, None)
        self._running.discard(request_id)

    def begin_step(
        self, step: SchedulerOutput, inside: Collection[str], waiting: Collection[str]
    ) -> tuple[int | None, int]:
        """Begin a step that vLLM has decided on, with requests whose loads are `inside` it.

        Those that are `waiting` begin to wait for theirs. Return the number by which workers report
        that it has ended, None if nothing depends on it; and how many requests in it are computed,
        though they could be loaded.
        """
        self._waiting.update(waiting)
        self._running = set(step.num_scheduled_tokens)
        computed = [name for name in self._running if self._modes.get(name) == "computed"]
        for name in (*computed, *inside, *waiting):
            self._modes.pop(name, None)
        number = None
        if self.loads not in ("step", "async"):
            number = next(self._numbers)
            tokens = step.total_num_scheduled_tokens
            self._steps.append(_Step(number, self._clock(), tokens, bool(inside)))
        return number, len(computed)

    def end_step(
        self, number: int | None, arrived: Iterable[str], loaded_per_s: float | None
    ) -> None:
        """Take what workers report of a step that has ended, by its number, None if none did.

        Requests have `arrived` whose loads beside steps have ended; these may have failed.
        """
        self._waiting.difference_update(arrived)
        if loaded_per_s is not None:
            before = loaded_per_s if self._loaded_per_s is None else self._loaded_per_s
            self._loaded_per_s = before + NEWEST * (loaded_per_s - before)
        # Some steps without tokens are never reported, as the one behind the last answer.
        while self._steps and number is not None and self._steps[0].number < number:
            self._steps.popleft()
        if self._steps and self._steps[0].number == number:
            self._measure(self._steps.popleft())

    def _measure(self, step: _Step) -> None:
        """Measure a step that ends now; one with loads inside says nothing of computing."""
        now = self._clock()
        seconds = now - max(step.started_s, self._ended_s)
        self._ended_s = now
        if not step.tokens:
            return
        after_large, self._after_large = self._after_large, step.tokens >= MANY_TOKENS
        if step.loads:
            return
        if self._after_large or after_large:
            # A part of a prompt gives no token, and vLLM does not wait for it: what it takes shows
            # in the step that follows.
            self._large_tokens = (1 - NEWEST) * self._large_tokens + step.tokens
            self._large_s = (1 - NEWEST) * self._large_s + seconds
        elif step.tokens <= FEW_TOKENS:
            self._small_steps_s.append(seconds)

    def computes(self, loaded: int, computed: int) -> bool:
        """Whether to compute what could be loaded, beside tokens that are computed anyway."""
        if self.loads != "auto" or not self._knows_steps:
            return False
        loading_s = self._tuning.load_us / 1e6
        if self._loaded_per_s is not None:
            loading_s += loaded / self._loaded_per_s
        saved_s = self._step_s(loaded + computed) - self._step_s(computed)
        return loading_s > saved_s and self._again()

    def reads(self, tokens: int) -> bool:
        """Whether to read tokens from a disk or a shared tier into memory, and not compute them."""
        if self.loads != "auto" or not self._reads or not self._knows_steps:
            return True
        reading_s = tokens * statistics.median(self._reads)
        return reading_s <= self._step_s(tokens) or not self._again()

    def was_read(self, tokens: int, seconds: float) -> None:
        """Take how long a read from a disk or a shared tier took, at least."""
        self._reads.append(seconds / tokens)

    def _again(self) -> bool:
        """Whether one more request is computed that could be loaded."""
        self._computed_in_turn = (self._computed_in_turn + 1) % (COMPUTED_IN_TURN + 1)
        return self._computed_in_turn != 0

    def waits(self, loaded: int, computed: int) -> bool:
        """Whether a request is to wait for its load, while others wait for their next token."""
        if self._loaded_per_s is None or not self._knows_steps:
            return loaded > self._tuning.loaded_per_computed * computed
        loading_s = loaded / self._loaded_per_s
        return loading_s > self._small_step_s + self._computing_s(computed)

    @property
    def _knows_steps(self) -> bool:
        return bool(self._large_tokens and self._small_steps_s)

    @property
    def _small_step_s(self) -> float:
        return statistics.median(self._small_steps_s)

    def _computing_s(self, tokens: int) -> float:
        return tokens * self._large_s / self._large_tokens

    def _step_s(self, tokens: int) -> float:
        """Return what a step takes: with few tokens as long as with hardly any."""
        return max(self._small_step_s, self._computing_s(tokens))
