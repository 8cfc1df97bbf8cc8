"""The chunks of a store: sizes, times of last use, pins, and which to evict. Knows no files."""

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
    hidden: bool = False  # its file takes room, and can't be read, or removed
    failed_reads: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that its file takes on the disk."""
        return disk_bytes(self.info.payload_bytes)


class ChunkIndex:
    """Entries by key, within a size, least recently used first; not thread-safe.

    Args:
        limit_bytes: bound on all entries and on what is reserved.
        pin_seconds: a pin older than this no longer protects.
    """

    def __init__(self, limit_bytes: int, pin_seconds: float) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._pin_seconds = pin_seconds
        self._entries: dict[str, Entry] = {}
        # Oldest first. An item may be out of date: the entry's own time decides, see `evict`.
        self._by_age: list[tuple[int, str]] = []
        self._pins: dict[str, tuple[int, float]] = {}  # how many, and when the last began
        self._changed: Callable[[str], object] = lambda key: None
        self._latest_ns = 0
        self._planned: dict[str, int] = {}  # times of last use of what is not stored yet

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, unless it is hidden."""
        entry = self._entries.get(key)
        return None if entry is None or entry.hidden else entry

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with every key now, and with a key whenever it comes or goes."""
        self._changed = changed
        for key in self._entries:
            changed(key)

    def clear(self) -> None:
        """Forget all entries; pins stay."""
        for key in list(self._entries):
            self.remove(key)
        self._by_age.clear()
        self.used_bytes = 0

    def add(self, key: str, info: ChunkInfo, used_ns: int, hidden: bool = False) -> None:
        """Add an entry, in place of one of this key."""
        self.remove(key)
        self._entries[key] = entry = Entry(info, used_ns, hidden)
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

    def hide(self, key: str) -> None:
        """Let an entry, if there is one, only take room, until it is evicted or replaced."""
        if entry := self._entries.get(key):
            entry.hidden = True
            self._changed(key)

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

    def pin(self, key: str) -> bool:
        """Keep an entry from eviction until as many `unpin`; False if there is none."""
        if key not in self:
            return False
        count = self._pins[key][0] if self.pinned(key) else 0
        self._pins[key] = count + 1, time.monotonic()
        return True

    def unpin(self, key: str) -> bool:
        """Take one pin back; False if there was none."""
        if not self.pinned(key):
            return False
        count, since = self._pins.pop(key)
        if count > 1:
            self._pins[key] = count - 1, since
        return True

    def pinned(self, key: str) -> bool:
        """Whether a pin holds `key`; it stays when the entry goes."""
        if key in self._pins and time.monotonic() - self._pins[key][1] >= self._pin_seconds:
            del self._pins[key]
        return key in self._pins

    def reserve(self, size_bytes: int) -> None:
        """Set room aside for a write under way; a size below 0 gives it back."""
        self.reserved_bytes += size_bytes

    def fits(self, need_bytes: int) -> bool:
        """Whether so much more has room now."""
        return self.used_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def can_fit(self, need_bytes: int) -> bool:
        """Whether so much more had room if all went that may go."""
        pins = [key for key in list(self._pins) if self.pinned(key)]
        pinned = [entry for key in pins if (entry := self._entries.get(key))]
        pinned_bytes = sum(entry.size_bytes for entry in pinned)
        return pinned_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def evict(self, need_bytes: int, used_ns: int) -> Iterator[str]:
        """Yield keys to be removed that were used before, until so much more has room.

        One that was not removed comes again in its order, by its time of last use.
        """
        asked = []
        try:
            while self._by_age and not self.fits(need_bytes):
                pushed_ns, key = heapq.heappop(self._by_age)
                entry = self._entries.get(key)
                if entry is None:
                    continue  # removed since it was pushed
                if entry.used_ns != pushed_ns:
                    heapq.heappush(self._by_age, (entry.used_ns, key))
                    continue
                asked.append(key)
                if pushed_ns > used_ns:
                    break
                if not self.pinned(key):
                    yield key
        finally:
            for key in asked:
                if entry := self._entries.get(key):
                    heapq.heappush(self._by_age, (entry.used_ns, key))
