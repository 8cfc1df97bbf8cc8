"""What may become of a chunk's file behind the store's back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from disk_contents import HEADER

KINDS = (3, 0, 1, 2, 4, 5)


def damage(file: Path, size: int, kind: int, at: int, others: list[Path]) -> str:
    """One bit flips, a file is cut or zeroed or goes, or another chunk's takes its place.

    Args:
        file: of a chunk.
        size: of its payload.
        kind: of damage.
        at: where, or by which of the others.
        others: files of other chunks.

    Returns:
        The chunk's fate; empty where this kind does nothing to such a file.
    """
    if kind == 0:
        file.unlink()
        return "gone"
    if kind == 1:
        os.truncate(file, HEADER + at % size if size else at % HEADER)
        return "header"
    if kind == 2:
        _flip(file, at % HEADER)
        return "header"
    if kind == 3 and size:
        _flip(file, HEADER + at % size)
        return "payload"
    if kind == 4 and others:
        shutil.copy2(others[at % len(others)], file)
        return "header"
    if kind == 5:
        file.write_bytes(bytes(HEADER + size))
        return "header"
    return ""


def _flip(file: Path, at: int) -> None:
    raw, times = bytearray(file.read_bytes()), file.stat()
    raw[at] ^= 1 << at % 8
    file.write_bytes(raw)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
