"""What becomes of each request's hit, as the scheduler's half chooses; see `load_policy`.

Loads are inside steps only where vLLM's scheduler begins a request anew whose load failed, see
`scheduler`. Elsewhere every request waits for its load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache_xpu.connector.load_policy import Hit, LoadPolicy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["BegunStep", "HitWays", "Way"]

Way = Literal["step", "async", "computed"]


class BegunStep(NamedTuple):
    """What the workers must know of a step.

    Args:
        number: by which they report that it has ended; None if nobody asks.
        inside: LMCache's descriptions of the loads inside it.
        computed_hits: number of requests in it that are computed, though they could be loaded.
    """

    number: int | None
    inside: list[Any]
    computed_hits: int


class HitWays:
    """The ways of one scheduler's requests."""

    def __init__(self) -> None:
        self._policy: LoadPolicy | None = None
        self._ways: dict[str, Way] = {}  # of requests that are not in a step yet
        self._running: set[str] = set()  # requests of the last step
        self._waiting: set[str] = set()  # requests whose loads are beside steps

    def allow_steps(self, policy: LoadPolicy) -> None:
        """Let a policy choose."""
        self._policy = policy

    @property
    def allows_steps(self) -> bool:
        """Whether loads may be inside steps."""
        return self._policy is not None

    def choose(self, request: Request, kept: int, tokens: int) -> Way:
        """Choose for a request that may be scheduled next; the last choice counts.

        Args:
            request: vLLM's.
            kept: tokens that vLLM's own prefix cache has of it.
            tokens: that can be loaded beyond those.
        """
        way: Way = "async"
        if self._policy is not None:
            hit = Hit(tokens, request.num_tokens - kept - tokens)
            # A load inside a step would be behind those beside it, and hold its step up.
            others = not self.is_alone(request.request_id)
            if self._policy.computes(hit):
                way = "computed"
            elif not self._policy.waits(hit, others=others):
                way = "step"
        self._ways[request.request_id] = way
        return way

    def is_alone(self, request_id: str) -> bool:
        """Whether no other request was in the last step, or waits for its load."""
        return not (self._running - {request_id} or self._waiting)

    def is_computed(self, request_id: str) -> bool:
        """Whether a request is computed, though its tokens could be loaded."""
        return self._ways.get(request_id) == "computed"

    def is_in_step(self, request_id: str) -> bool:
        """Whether a request's load is inside its step."""
        return self._ways.get(request_id) == "step"

    def begin_step(self, step: SchedulerOutput, loads: Sequence[Any]) -> BegunStep:
        """Hear of a step that vLLM has decided on.

        Args:
            step: vLLM's.
            loads: LMCache's descriptions of those that begin with it.
        """
        inside = [load for load in loads if self._ways.get(load.request_id) == "step"]
        self._running = set(step.num_scheduled_tokens)
        computed = [name for name in self._running if self.is_computed(name)]
        self._waiting.update(load.request_id for load in loads if load not in inside)
        for name in (*computed, *(load.request_id for load in loads)):
            self._ways.pop(name, None)
        number = None
        if self._policy is not None:
            number = self._policy.begin_step(step.total_num_scheduled_tokens, loads=bool(inside))
        return BegunStep(number, inside, len(computed))

    def end_step(
        self, number: int | None, arrived: Iterable[str], loaded_per_s: float | None
    ) -> None:
        """Hear that a step has ended, whose loads beside it have, and how fast the last ones were.

        Args:
            number: the step's; None if no worker told it.
            arrived: requests; their loads may have failed.
            loaded_per_s: as the worker has measured.
        """
        self._waiting.difference_update(arrived)
        if self._policy is not None:
            self._policy.end_step(number)
            self._policy.hear(loaded_per_s)

    def finished(self, request_id: str) -> None:
        """Forget a request. A load beside steps goes on."""
        self._ways.pop(request_id, None)
        self._running.discard(request_id)
