"""Python's garbage collection, put off while the device waits for the engine's thread.

A collection of young objects looks at every number of every new prompt. Beside an H200 one ran
before the first layer of nearly every step that loaded: 3 to 4 milliseconds with four prompts of
17,000 tokens. Put off, it runs when a step is enqueued and the thread waits for the device anyway.
"""

from __future__ import annotations

import gc

_put_off = False  # by us; one that somebody else has disabled stays so


def put_off() -> None:
    """No collection from now on until `allow`."""
    global _put_off
    if gc.isenabled():
        gc.disable()
        _put_off = True


def allow() -> None:
    """Collect again, if it was put off here."""
    global _put_off
    if _put_off:
        _put_off = False
        gc.enable()
