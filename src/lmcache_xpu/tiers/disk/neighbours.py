"""Files in the directories of an engine's other ranks, which those hold and this one only reads.

A file has its name when it is complete, its header says what it is, and its bytes have a checksum.
So it can be read while its rank may remove it: what is read is right, or a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_xpu.metrics import LOAD_DISK
from lmcache_xpu.tiers.disk.chunk_directory import ChunkDirectory
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, read_chunk, scan_chunk

__all__ = ["Neighbours"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only


class Neighbours:
    """Chunks in other ranks' directories. Safe for any number of threads.

    What engines with other numbers of ranks left there is read once, from the headers: none of it
    is added while this engine runs. So where there is nothing, a look-up costs no system call.

    Args:
        directories: of other ranks, also of those that this engine does not have. Files may move
            meanwhile from one to another that comes later.
        shared: the one of these whose rank stores for this one, too; None if this rank does.
        is_meant: whether a key names a chunk of this engine's model.
    """

    def __init__(
        self, directories: Sequence[Path], shared: Path | None, is_meant: Callable[[str], bool]
    ) -> None:
        self._directories = [ChunkDirectory(path) for path in directories]
        self._shared = None if shared is None else ChunkDirectory(shared)
        self._left = {
            key for each in self._directories for key in each.scan_keys() if is_meant(key)
        }

    def __len__(self) -> int:
        """Number of chunks that were there at the start."""
        return len(self._left)

    def file(self, key: str) -> Path | None:
        """Return the file of a chunk; None if there is none, or not any more."""
        if key in self._left:
            for directory in self._directories:
                if os.access(file := directory.file(key), os.F_OK):
                    return file
            self._left.discard(key)
        if self._shared is not None and os.access(file := self._shared.file(key), os.F_OK):
            return file
        return None

    def info(self, key: str) -> ChunkInfo | None:
        """Return what a chunk's header says; None if there is no such chunk."""
        if (file := self.file(key)) is None:
            return None
        try:
            chunk = scan_chunk(file)
        except OSError:  # removed since, or not to be read now
            return None
        if chunk is not None and chunk[0] == key:
            return chunk[1]
        self._remove(file, key, "its header or its length is not right")
        return None

    def read(self, key: str, buffer: memoryview) -> bool:
        """Read a chunk's payload into `buffer`, whose length must be the payload's.

        A damaged file is removed, as its own rank would do: it takes that for a removal by hand.
        One that can't be read now stays.

        Returns:
            True if `buffer` holds the chunk; False on a miss, and then it may hold anything.
        """
        file, info = self.file(key), self.info(key)
        if file is None or info is None or info.payload_bytes != len(buffer):
            return False
        try:
            fault = read_chunk(file, key, info, buffer)
        except OSError:
            return False
        if fault is not None:
            self._remove(file, key, fault)
        return fault is None

    def _remove(self, file: Path, key: str, fault: str) -> None:
        self._left.discard(key)
        if not os.access(file, os.F_OK):
            return
        LOAD_DISK.failed("corrupt")
        with contextlib.suppress(OSError):  # gone already, or not ours to remove
            file.unlink()
        logger.warning(
            "Removed a chunk from %s: %s (docs: troubleshooting#disk-removed)", file.parent, fault
        )
