"""The phases of a step, and which calls of `InFlight` belong in each.

A step has four phases. Each call belongs in some of them; a call in another one is an error of the
caller's, and an assertion:

    call          IDLE        SCHEDULING  PREPARING   COMPUTING   what it does
    schedule      SCHEDULING  stays       -           -           loads may begin before their step
    begin_step    PREPARING   PREPARING   stays       PREPARING   new blocks wait for their readers
    add_load      -           stays       stays       stays       enqueues the first layers
    before_all    -           -           stays       stays       the engine waits for all layers
    before_layer  stays       -           COMPUTING   stays       the engine waits for this layer
    after_layer   stays       -           COMPUTING   stays       enqueues the next layers
    end_step      stays       -           IDLE        IDLE        leaves nothing to load

`protect`, `add_store`, `publish`, `release`, `drain` and `close` may be called in each phase. In
IDLE, a layer is a drafter's: its turn comes when the step's loads have been ended.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where the engine is between two ends of a step."""

    IDLE = auto()  # no step has begun
    SCHEDULING = auto()  # vLLM still decides on a step, and loads for it have begun
    PREPARING = auto()  # the step is known, and the engine has not come to its first layer
    COMPUTING = auto()  # the engine is at its layers

    def check(self, call: str, *phases: Phase) -> None:
        """Assert that a call of `InFlight` belongs in this phase.

        Args:
            call: its name.
            phases: those in which it belongs.
        """
        assert self in phases, (
            f"InFlight.{call} was called in phase {self.name}; "
            f"it belongs in {' or '.join(phase.name for phase in phases)}."
        )
