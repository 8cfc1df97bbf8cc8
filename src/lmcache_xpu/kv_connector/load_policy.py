"""Which loads a request waits for, and which its step brings along.

A load inside the step of its request, beside the layers, ends sooner. But all others in that step
wait for it as well. So a request waits for its load, while others are computed, where both hold:

    others      somebody else waits for a token
    too long    the load takes longer than the step would take without it

How long a step takes is measured here; how fast loads are, the workers report. Until then a ratio
stands for both, see `Tuning.loaded_per_computed`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

__all__ = ["LoadPolicy", "Loads"]

Loads = Literal["auto", "step", "async"]

# Tokens of a step from which on they decide how long it takes; with less, the weights do.
MANY_TOKENS = 512
NEWEST = 0.25  # what the newest measurement counts in a mean
SMALL_STEPS = 32  # the last so many are remembered
STEPS_AHEAD = 8  # steps that vLLM schedules before it hears of the first, at most


class _Step(NamedTuple):
    begun: float
    tokens: int
    loads: bool


class LoadPolicy:
    """Chooses for each request, on the scheduler's side.

    Args:
        loads: `step` or `async` leaves no choice.
        loaded_per_computed: tokens that are loaded while one is computed, until that is measured.
        clock: seconds.
    """

    def __init__(
        self,
        loads: Loads,
        loaded_per_computed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loads = loads
        self._ratio = loaded_per_computed
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=STEPS_AHEAD)
        self._ended = 0.0  # when the last step did
        self._loaded_per_s: float | None = None
        self._small_steps_s: deque[float] = deque(maxlen=SMALL_STEPS)
        self._large_tokens = self._large_s = 0.0  # of large steps, older ones counting less
        self._after_large = False  # the last step was one

    def begin_step(self, tokens: int, *, loads: bool) -> None:
        """Hear of a step that vLLM has decided on.

        Args:
            tokens: that it computes; one without any is not measured.
            loads: it has loads inside, and so says nothing of computing.
        """
        self._steps.append(_Step(self._clock(), tokens, loads))

    def end_step(self) -> None:
        """Hear that the oldest step which has not ended has ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        seconds = now - max(step.begun, self._ended)
        self._ended = now
        after_large, self._after_large = self._after_large, step.tokens >= MANY_TOKENS
        if step.loads or not step.tokens:
            return
        if self._after_large or after_large:
            # A part of a prompt gives no token, and vLLM does not wait for it: what it takes shows
            # in the step that follows.
            self._large_tokens = (1 - NEWEST) * self._large_tokens + step.tokens
            self._large_s = (1 - NEWEST) * self._large_s + seconds
        else:
            self._small_steps_s.append(seconds)

    def hear(self, loaded_per_s: float) -> None:
        """Take the speed of a load that a worker has measured, in tokens a second."""
        last = self._loaded_per_s or loaded_per_s
        self._loaded_per_s = last + NEWEST * (loaded_per_s - last)

    def waits(self, loaded: int, computed: int, *, others: bool) -> bool:
        """Whether a request is to wait for its load.

        Args:
            loaded: tokens of the load.
            computed: tokens of the request that its step computes.
            others: other requests wait for their next token.
        """
        if self._loads != "auto":
            return self._loads == "async"
        if not others:
            return False
        if self._loaded_per_s is None or not self._large_tokens or not self._small_steps_s:
            return loaded > self._ratio * computed
        step_s = statistics.median(self._small_steps_s)
        computing_s = computed * self._large_s / self._large_tokens
        return loaded / self._loaded_per_s > step_s + computing_s
