"""The chunks of a store: sizes, times of last use, and which one goes first. Knows no files."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["ChunkIndex", "Entry"]

_MOST_PLANNED = 8192
_PLANNED_NS = 60 * 10**9  # a prompt is stored within that, once it was looked up


@dataclass(slots=True)
class Entry:
    """What the store knows of one chunk."""

    info: ChunkInfo
    used_ns: int

    @property
    def size_bytes(self) -> int:
        """Bytes that its file takes on the disk."""
        return disk_bytes(self.info.payload_bytes)


class ChunkIndex:
    """Entries by key, within a size, least recently used first; not thread-safe.

    Args:
        limit_bytes: bound on all entries and on what is reserved.

    Attributes:
        used_bytes: of all entries.
        reserved_bytes: of writes under way.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._changed: Callable[[str], object] = lambda key: None
        self._entries: dict[str, Entry] = {}
        # Oldest first. An item may be out of date: the entry's own time decides, see `oldest`.
        self._by_age: list[tuple[int, str]] = []
        self._latest_ns = 0
        self._planned: dict[str, int] = {}  # times of last use of what is not stored yet

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Entry | None:
        """Return the entry of `key`."""
        return self._entries.get(key)

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with every key now, and with a key whenever it comes or goes."""
        self._changed = changed
        for key in self._entries:
            changed(key)

    def reserve(self, size_bytes: int) -> None:
        """Set room aside for a write under way; a size below 0 gives it back."""
        self.reserved_bytes += size_bytes

    def add(self, key: str, info: ChunkInfo, used_ns: int) -> None:
        """Add an entry, in place of one of this key."""
        self.remove(key)
        self._entries[key] = entry = Entry(info, used_ns)
        heapq.heappush(self._by_age, (used_ns, key))
        self.used_bytes += entry.size_bytes
        self._changed(key)

    def add_earlier(self, chunks: Iterable[tuple[str, ChunkInfo, int]]) -> dict[str, int]:
        """Add chunks of earlier runs, as used no later than now: the clock may have been ahead.

        Returns the times of last use that were changed for it.
        """
        by_age, now, changed = sorted(chunks, key=lambda chunk: chunk[2]), self.now(), {}
        for place, (key, info, used_ns) in enumerate(by_age):
            latest = now - len(by_age) + place  # which keeps their order
            if used_ns > latest:
                changed[key] = used_ns = latest
            fits = disk_bytes(info.payload_bytes) <= self.limit_bytes
            self.add(key, info, used_ns if fits else 0)
        return changed

    def now(self, count: int = 1) -> int:
        """Take times of last use for `count` chunks: this one, and each nanosecond before it.

        They are later than all that were taken before, even if the clock was set back.
        """
        self._latest_ns = max(time.time_ns(), self._latest_ns + count)
        return self._latest_ns

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one."""
        if entry := self._entries.pop(key, None):
            self.used_bytes -= entry.size_bytes
            self._changed(key)

    def mark(self, key: str, used_ns: int) -> bool:
        """Set an entry's time of last use; False if there is none, and then it is for the next."""
        self._planned.pop(key, None)
        if entry := self._entries.get(key):
            entry.used_ns = used_ns
            return True
        self._planned[key] = used_ns
        if len(self._planned) > _MOST_PLANNED:
            del self._planned[next(iter(self._planned))]
        return False

    def planned(self, key: str, used_ns: int) -> int:
        """Take the time that `mark` has set before there was an entry; else return this one."""
        planned_ns = self._planned.pop(key, used_ns)
        return planned_ns if planned_ns > used_ns - _PLANNED_NS else used_ns

    def fits(self, need_bytes: int) -> bool:
        """Whether so much more has room now."""
        return self.used_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def oldest(self) -> tuple[int, str] | None:
        """Return the time of last use and the key of what was used before all else."""
        while self._by_age:
            used_ns, key = self._by_age[0]
            entry = self._entries.get(key)
            if entry is not None and entry.used_ns == used_ns:
                return used_ns, key
            heapq.heappop(self._by_age)
            if entry is not None:
                heapq.heappush(self._by_age, (entry.used_ns, key))
        return None
