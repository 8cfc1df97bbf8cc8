"""Python's garbage collection, put off while the device waits for the engine's thread.

A collection of young objects looks at every number of every new prompt. Beside an H200 one ran
before the first layer of nearly every step that loaded: 3 to 4 milliseconds with four prompts of
17,000 tokens. Put off, it runs when a step is enqueued and the thread waits for the device anyway.

A worker's half owns it in its process, also for a scheduler in the same process; a scheduler alone
in its process has one of its own.
"""

from __future__ import annotations

import gc

__all__ = ["GarbageCollection"]


class GarbageCollection:
    """Garbage collection of this process; what somebody else has disabled stays so."""

    def __init__(self) -> None:
        self._put_off = False

    def put_off(self) -> None:
        """Collect nothing from now on until `allow`."""
        if gc.isenabled():
            gc.disable()
            self._put_off = True

    def allow(self) -> None:
        """Collect again, if it was put off here."""
        if self._put_off:
            self._put_off = False
            gc.enable()
