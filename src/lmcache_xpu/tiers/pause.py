"""What is not done again for a while: a server is not tried, a warning is not logged."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["Pause", "complain"]

logger = logging.getLogger("vllm.lmcache_xpu.remote")  # vLLM prints its own loggers only
disk_logger = logging.getLogger("vllm.lmcache_xpu.disk")

_QUIET_S = 60.0
_quiet_until: dict[str, float] = {}  # by message
_lock = threading.Lock()


class Pause:
    """A while in which a server is not tried; its beginning is logged with its cause.

    Args:
        meaning: what happens to the server meanwhile, for that line.
    """

    def __init__(self, meaning: str) -> None:
        self._meaning = meaning
        self._end = 0.0

    @property
    def on(self) -> bool:
        """Whether it has begun and not ended."""
        return time.monotonic() < self._end

    def begin(self, seconds: float, cause: Exception) -> None:
        """Pause for so many seconds from now on."""
        if not self.on:
            logger.warning(
                "shared tier: %s for %g s: %s (docs: troubleshooting#shared-paused)",
                self._meaning,
                seconds,
                cause,
            )
        self._end = time.monotonic() + seconds


def complain(message: str, *args: object) -> None:
    """Log a warning of the disk tier, at most once a minute, however often its cause occurs."""
    with _lock:
        if time.monotonic() < _quiet_until.get(message, 0.0):
            return
        _quiet_until[message] = time.monotonic() + _QUIET_S
    disk_logger.log(logging.WARNING, "disk tier: " + message, *args)
