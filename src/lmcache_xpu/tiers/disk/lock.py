"""One process at a time in a directory."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Holds `directory` from construction until `release`, through flock on a file in it.

    The kernel lets go of it however the process ends. The file stays and names the last holder.

    Args:
        directory: must exist.
        wait_seconds: how long to wait for another holder, e.g. an engine that is shutting down.

    Raises:
        SettingsError: another process, or another lock in this one, holds it.
        OSError: the lock file can't be created or opened.
    """

    def __init__(self, directory: Path, wait_seconds: float) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(directory / "lock", flags, 0o600)
        deadline = time.monotonic() + wait_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                holder = os.pread(self._fd, 32, 0).decode()
                self.release()
                raise SettingsError(
                    f"directory {directory} in use by process {holder}",
                    "one directory for each process",
                    "Stop that process, or give this one another directory.",
                )
            time.sleep(0.05)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let go; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
