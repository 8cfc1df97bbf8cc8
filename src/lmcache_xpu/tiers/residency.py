"""Which chunks a worker's tiers hold, and what has changed since vLLM last asked.

Only kept where the engine publishes KV events; see `kv_events`. Tiers report each part of a chunk
(a layerwise chunk is several objects): a tier holds the chunk when it holds all parts.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

__all__ = ["CPU", "DISK", "SHARED", "Change", "Residency", "chunk_name"]

CPU, DISK, SHARED = "cpu", "disk", "shared"


class Change(NamedTuple):
    """A chunk that a tier of a worker holds now, or no longer."""

    tier: str
    chunk: str
    stored: bool


def chunk_name(chunk_hash: int | bytes) -> str:
    """Return a chunk's hash as LMCache's keys write it."""
    return chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}"


class Residency:
    """Collects what tiers report of their chunks, from any thread; the same twice counts once.

    Args:
        parts: objects of a chunk in tiers of this host: one, or with layerwise several.
    """

    def __init__(self, parts: int = 1) -> None:
        self._whole = {CPU: (1 << parts) - 1, DISK: (1 << parts) - 1, SHARED: 1}
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], int] = {}  # a bit for each that is there
        self._changes: list[Change] = []

    def changed(self, tier: str, chunk: str, stored: bool, part: int = 0) -> None:
        """Report that a tier holds a part of a chunk, or does not."""
        with self._lock:
            before = self._parts.get((tier, chunk), 0)
            after = before | 1 << part if stored else before & ~(1 << part)
            if after:
                self._parts[tier, chunk] = after
            else:
                self._parts.pop((tier, chunk), None)
            whole = self._whole[tier]
            if (before == whole) != (after == whole):
                self._changes.append(Change(tier, chunk, after == whole))

    def take(self) -> list[Change]:
        """Return the changes since the last call, in their order."""
        if not self._changes:  # without the lock: asked in every step
            return []
        with self._lock:
            changes, self._changes = self._changes, []
        return changes
