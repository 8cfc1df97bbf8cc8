"""A while in which a server is not tried."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["Pause"]


class Pause:
    """A while in which something is not tried; its beginning is logged with its cause.

    Args:
        logger: for that line.
        meaning: what happens to the server meanwhile, for that line.
    """

    def __init__(self, logger: logging.Logger, meaning: str) -> None:
        self._logger = logger
        self._meaning = meaning
        self._end = 0.0

    @property
    def on(self) -> bool:
        """Whether it has begun and not ended."""
        return time.monotonic() < self._end

    def begin(self, seconds: float, cause: Exception) -> None:
        """Pause for so many seconds from now on."""
        if not self.on:
            self._logger.warning(
                "shared tier: %s for %g s: %s (docs: troubleshooting#shared-paused)",
                self._meaning,
                seconds,
                cause,
            )
        self._end = time.monotonic() + seconds
