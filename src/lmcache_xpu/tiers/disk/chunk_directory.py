"""The files of a chunk store: their names, and one process at a time among them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.chunk_file import scan_chunk
from lmcache_xpu.tiers.disk.lock import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo

__all__ = ["ChunkDirectory"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_SUFFIX = ".lmxkv"
_TEMPORARY = ".lmxkv.tmp"


class ChunkDirectory:
    """A directory that holds one file for each chunk, named by the hash of the chunk's key.

    Files of other names are left alone. Not thread-safe.

    Args:
        path: the directory; made by `open`.
        left: directories whose ranks are no more; their files come here with `open`.
    """

    def __init__(self, path: Path, left: Sequence[Path] = ()) -> None:
        self.path = path
        self._left = left
        self._lock: DirectoryLock | None = None
        self._serial = itertools.count()

    def open(self, lock_seconds: float) -> None:
        """Make the directory, mode 0700, where it is missing, and keep other processes out.

        Args:
            lock_seconds: how long to wait for another process to let go of it.

        Raises:
            SettingsError: another process uses it.
            OSError: it can't be made, or is another user's.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self._lock = DirectoryLock(self.path, lock_seconds)
        for left in self._left:
            try:
                self._adopt(left)
            except (SettingsError, OSError) as error:
                logger.warning(
                    "disk tier: left as it is: %s (docs: troubleshooting#disk-left)", error
                )

    def release(self) -> None:
        """Let other processes in; may be called twice."""
        if self._lock is not None:
            self._lock.release()

    def file(self, key: str) -> Path:
        """Where the chunk of this key is, or would be."""
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"

    def temporary(self) -> Path:
        """A new name for a file that is being written; `scan` removes it after a crash."""
        return self.path / f"{next(self._serial)}{_TEMPORARY}"

    def scan(self) -> Iterator[tuple[str, ChunkInfo, int] | None]:
        """Yield each chunk of earlier runs as `scan_chunk` reads it; None for a damaged file.

        Removes damaged files, and those that were not written to their end.
        """
        for file in self.path.iterdir():
            damaged = False
            if file.name.endswith(_SUFFIX):
                chunk = self._intact(file)
                damaged = chunk is None
                yield chunk
            if damaged or file.name.endswith(_TEMPORARY):
                with contextlib.suppress(OSError):  # e.g. a directory of that name
                    file.unlink()

    def scan_keys(self) -> Iterator[str]:
        """Yield the keys of the chunks; changes nothing, as another process may hold them."""
        with contextlib.suppress(OSError):  # there is no such directory
            for file in self.path.iterdir():
                if file.name.endswith(_SUFFIX) and (chunk := self._intact(file)):
                    yield chunk[0]

    def mark(self, key: str, used_ns: int) -> None:
        """Keep a chunk's time of last use over a restart."""
        with contextlib.suppress(OSError):  # removed by hand: there is nothing to keep
            os.utime(self.file(key), ns=(used_ns, used_ns))

    def remove(self, key: str) -> None:
        """Remove a chunk's file, if it is there."""
        with contextlib.suppress(OSError):  # gone already, or not ours to remove any more
            self.file(key).unlink()

    def _adopt(self, left: Path) -> None:
        """Move the files of a directory here; what can't be moved is removed.

        Raises:
            SettingsError: another process uses it.
            OSError: it is another user's, or not a directory.
        """
        lock = DirectoryLock(left, wait_seconds=0)
        try:
            for file in left.iterdir():
                if not file.name.endswith((_SUFFIX, _TEMPORARY)):
                    continue
                try:
                    file.rename(self.path / file.name)
                except OSError:  # e.g. another disk's
                    file.unlink()
        finally:
            lock.release()

    def _intact(self, file: Path) -> tuple[str, ChunkInfo, int] | None:
        try:
            chunk = scan_chunk(file)
        except OSError:
            return None
        return chunk if chunk and file.name == self.file(chunk[0]).name else None
