"""Warnings of the disk tier that may have a cause a thousand times a second."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["Complaint"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_QUIET_SECONDS = 60.0


class Complaint:
    """A warning that is logged at most once a minute, however often its cause occurs."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def log(self, *args: object) -> None:
        """Log the message, filled in with `args`, unless it was logged a moment ago."""
        with self._lock:
            if time.monotonic() < self._quiet_until:
                return
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
        logger.warning("disk tier: " + self._message, *args)
