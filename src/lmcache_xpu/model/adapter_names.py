"""A LoRA adapter's part of a chunk's name: by its content, while that is what the worker has.

vLLM tells no connector when a worker loads an adapter, or loads it anew. So an adapter has a name
only while its files are as they were when this engine began. An inode's change time tells: unlike
its modification time, no program can set it back.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from lmcache_xpu.model.model_fingerprint import fingerprint, logger

_BEGAN_NS = time.time_ns()  # of this module, which comes with the connector, before any adapter
_TICK_NS = 20_000_000  # by which a file's times may lie behind the clock
_State = tuple[tuple[int, ...], ...]


def adapter_name(path: str) -> str | None:
    """Return an adapter's name; None where the worker may have other weights than the files.

    They changed since the engine began, or can't be read. Then nothing of the adapter may be looked
    up or stored.
    """
    try:
        state = _state(Path(path))
        changed_ns = max(ctime for *_, ctime in state)
        if changed_ns < min(_BEGAN_NS, time.time_ns()) - _TICK_NS:
            return _named(path, state)
    except Exception as error:  # whatever a half-written file does to who reads it
        _complain(path, f"it can't be read ({type(error).__name__}: {error})")
        return None
    _complain(path, "its files changed after this engine began")
    return None


def _state(path: Path) -> _State:
    """Return what changes with a file of the adapter, its directory, or a link on the way there."""
    links = [each.lstat() for each in (path, *path.parents) if each.is_symlink()]
    inodes = [*links, path.stat(), *(file.stat() for file in sorted(path.glob("*")))]
    return tuple((i.st_ino, i.st_size, i.st_mtime_ns, i.st_ctime_ns) for i in inodes)


@functools.lru_cache(maxsize=1024)
def _named(path: str, _: _State) -> str:
    return fingerprint(path)


@functools.lru_cache(maxsize=1024)
def _complain(path: str, reason: str) -> None:
    """Log once."""
    logger.warning(
        "lmcache-xpu: nothing is stored or loaded for the adapter at %s: %s "
        "(docs: troubleshooting#adapter-changed)",
        path,
        reason,
    )
