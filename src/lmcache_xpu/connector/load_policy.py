"""What becomes of a hit: loaded inside its step, loaded while its request waits, or computed.

A load inside the step of its request, beside the layers, ends sooner. But all others in that step
wait for it as well. So a request waits for its load, while others are computed, where

    others      somebody else waits for a token, and
    too long    the load takes longer than the step would take without it

And it is computed where that takes no longer than the load: few tokens, which a step computes
beside others for nothing.

How long steps take is measured here; how fast loads are, the worker reports. Until then a ratio
stands for both, see `Tuning.loaded_per_computed`, and nothing is computed that can be loaded.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from lmcache_xpu.transfer.tuning import Tuning

__all__ = ["Hit", "LoadPolicy", "Loads"]

Loads = Literal["auto", "always", "step", "async"]

# Tokens of a step from which on they decide how long it takes, and up to which the weights do.
MANY_TOKENS, FEW_TOKENS = 512, 128
NEWEST = 0.25  # what the newest measurement counts in a mean
SMALL_STEPS = 32  # the last so many are remembered
STEPS_AHEAD = 8  # steps that vLLM schedules before it hears of the first, at most
# So many hits are computed before one is loaded again: a disk may have become faster.
COMPUTED_IN_TURN = 16


class Hit(NamedTuple):
    """What a look-up has promised for a request.

    Args:
        loaded: tokens of the load.
        computed: tokens of the request that its step computes.
    """

    loaded: int
    computed: int


class _Step(NamedTuple):
    number: int
    begun: float
    tokens: int
    loads: bool


class LoadPolicy:
    """Chooses for each request, on the scheduler's side.

    Args:
        loads: `always` never computes a hit; `step` or `async` leaves no choice.
        tuning: of the engine's device.
        clock: seconds.
    """

    def __init__(
        self, loads: Loads, tuning: Tuning, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loads = loads
        self._tuning = tuning
        self._clock = clock
        self._numbers = itertools.count(1)
        self._steps: deque[_Step] = deque(maxlen=STEPS_AHEAD)
        self._ended = 0.0  # when the last step did
        self._loaded_per_s: float | None = None
        self._small_steps_s: deque[float] = deque(maxlen=SMALL_STEPS)
        self._large_tokens = self._large_s = 0.0  # of large steps, older ones counting less
        self._after_large = False  # the last step was one
        self._computed_in_turn = 0

    def begin_step(self, tokens: int, *, loads: bool) -> int:
        """Hear of a step that vLLM has decided on; return its number, for `end_step`.

        Args:
            tokens: that it computes; one without any is not measured.
            loads: it has loads inside, and so says nothing of computing.
        """
        step = _Step(next(self._numbers), self._clock(), tokens, loads)
        self._steps.append(step)
        return step.number

    def end_step(self, number: int | None) -> None:
        """Hear that a step has ended.

        vLLM says nothing of some that have no tokens, as the one behind the last answer.

        Args:
            number: the step's; None if no worker told it.
        """
        while self._steps and number is not None and self._steps[0].number < number:
            self._steps.popleft()
        if not self._steps or self._steps[0].number != number:
            return
        step, now = self._steps.popleft(), self._clock()
        seconds = now - max(step.begun, self._ended)
        self._ended = now
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

    def hear(self, loaded_per_s: float | None) -> None:
        """Take the speed of the last loads, in tokens per second; None where none has ended."""
        self._loaded_per_s = _mean(self._loaded_per_s, loaded_per_s)

    def computes(self, hit: Hit) -> bool:
        """Whether a request is to be computed, though its tokens could be loaded."""
        if self._loads != "auto" or not self._large_tokens or not self._small_steps_s:
            return False
        loading_s = self._tuning.load_us / 1e6
        if self._loaded_per_s is not None:
            loading_s += hit.loaded / self._loaded_per_s
        saved_s = self._step_s(hit.loaded + hit.computed) - self._step_s(hit.computed)
        if loading_s <= saved_s:
            return False
        self._computed_in_turn = (self._computed_in_turn + 1) % (COMPUTED_IN_TURN + 1)
        return self._computed_in_turn != 0

    def waits(self, hit: Hit, *, others: bool) -> bool:
        """Whether a request is to wait for its load.

        Args:
            hit: of the request.
            others: other requests wait for their next token.
        """
        if self._loads in ("step", "async"):
            return self._loads == "async"
        if not others:
            return False
        if self._loaded_per_s is None or not self._large_tokens or not self._small_steps_s:
            return hit.loaded > self._tuning.loaded_per_computed * hit.computed
        return hit.loaded / self._loaded_per_s > self._small_step_s + self._computing_s(
            hit.computed
        )

    @property
    def _small_step_s(self) -> float:
        return statistics.median(self._small_steps_s)

    def _computing_s(self, tokens: int) -> float:
        return tokens * self._large_s / self._large_tokens

    def _step_s(self, tokens: int) -> float:
        """Return what a step takes: with few tokens as long as with hardly any."""
        return max(self._small_step_s, self._computing_s(tokens))


def _mean(before: float | None, newest: float | None) -> float | None:
    """Return the mean after another measurement; what was measured, if there was none before."""
    if before is None or newest is None:
        return before if newest is None else newest
    return before + NEWEST * (newest - before)
