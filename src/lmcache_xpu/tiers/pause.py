"""What is not done again for a while: a server is not tried, a warning is not logged."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["Complaint", "Pause"]

logger = logging.getLogger("vllm.lmcache_xpu.remote")  # vLLM prints its own loggers only
disk_logger = logging.getLogger("vllm.lmcache_xpu.disk")

_QUIET_SECONDS = 60.0


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


class Complaint:
    """A warning of the disk tier, logged at most once a minute, however often its cause occurs."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def log(self, *args: object) -> None:
        """Log the message, filled in with `args`, unless it was logged within a minute."""
        with self._lock:
            if time.monotonic() < self._quiet_until:
                return
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
        disk_logger.log(logging.WARNING, "disk tier: " + self._message, *args)
