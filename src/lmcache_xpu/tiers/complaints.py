"""Warnings of the tiers that are not logged again for a while."""

from __future__ import annotations

import logging
import threading
import time
from typing import Literal

# vLLM prints its own loggers only.
LOGGERS = {tier: logging.getLogger(f"vllm.lmcache_xpu.{tier}") for tier in ("disk", "shared")}
_QUIET_S = 60.0
_quiet_until: dict[str, float] = {}  # by message
_lock = threading.Lock()


def complain(message: str, *args: object, tier: Literal["disk", "shared"] = "disk") -> None:
    """Log a warning of a tier, at most once a minute, however often its cause occurs."""
    with _lock:
        if time.monotonic() < _quiet_until.get(message, 0.0):
            return
        _quiet_until[message] = time.monotonic() + _QUIET_S
    LOGGERS[tier].warning(f"{tier} tier: {message}", *args)
