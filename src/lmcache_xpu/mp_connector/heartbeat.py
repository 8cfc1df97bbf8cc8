"""LMCache's heartbeat of a worker, which gives back the memory of a server that is gone.

A server that was killed leaves its memory to whoever maps it. The next one looks for room first,
and lends none where there is too little.
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

    def __init__(self, lost: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._lost = lost

    def _execute(self) -> Any:
        summary = super()._execute()
        if not (self._health_event.is_set() or self.stop_requested):
            self._lost()
        return summary
