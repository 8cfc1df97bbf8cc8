"""What may become of a chunk's file behind the store's back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from disk_contents import HEADER

KINDS = (3, 0, 1, 2, 4, 5)


def damage(file: Path, size: int, kind: int, at: int, others: list[Path]) -> str:
    """One bit flips, a file is cut or zeroed or goes, or another chunk's takes its place.

    The file keeps its times, as when a disk damages it.

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
    times, fate = file.stat(), "header"
    if kind == 1:
        os.truncate(file, HEADER + at % size if size else at % HEADER)
    elif kind == 2:
        _flip(file, at % HEADER)
    elif kind == 3 and size:
        _flip(file, HEADER + at % size)
        fate = "payload"
    elif kind == 4 and others:
        shutil.copy(others[at % len(others)], file)
    elif kind == 5:
        file.write_bytes(bytes(HEADER + size))
    else:
        fate = ""
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return fate


def _flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << at % 8
    file.write_bytes(raw)
