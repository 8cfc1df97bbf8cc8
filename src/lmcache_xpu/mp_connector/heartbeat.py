"""LMCache's heartbeat, which gives back the memory of a server that is gone.

A server that was killed leaves its memory to whoever maps it. The next one looks for room first,
and lends none where there is too little.

LMCache's takes a server for healthy by an answer that was on its way when a question was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmcache_xpu.versions.lmcache_server import HeartbeatThread

__all__ = ["Heartbeat"]


class Heartbeat(HeartbeatThread):  # type: ignore[misc]  # untyped base
    """LMCache's.

    Args:
        lost: called after each beat that the server did not answer.
        options: LMCache's.
    """

    def __init__(self, lost: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self._lost = lost
        self._doubts = 0

    def doubt(self) -> None:
        """Hear that the server left a question unanswered; called before it counts as lost."""
        self._doubts += 1

    def _execute(self) -> Any:
        doubts = self._doubts
        summary = super()._execute()
        if self._doubts != doubts:
            self._health_event.clear()
        if not (self._health_event.is_set() or self.stop_requested):
            self._lost()
        return summary
