"""What a chunk store holds: sizes, times of last use, pins, and whom to evict. Knows no files."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["ChunkIndex", "Counters", "Entry"]


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since a store was opened, and the bytes it holds now.

    `misses` counts reads that delivered nothing, `dropped` puts that stored nothing, `corrupt`
    files removed because their content was not what it should be, `errors` failed system calls.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    bytes: int = 0


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


@dataclass(slots=True)
class _Pin:
    count: int
    since: float


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
        self._pins: dict[str, _Pin] = {}
        self._changed: Callable[[str], object] = lambda key: None
        self._latest_ns = 0

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
        """Add chunks of earlier runs; none of them was used later than now.

        A clock that was ahead then would otherwise let them outlive all that is added since.

        Returns:
            The times of last use that were changed for it.
        """
        by_age, now, changed = sorted(chunks, key=lambda chunk: chunk[2]), self.now(), {}
        for place, (key, info, used_ns) in enumerate(by_age):
            if used_ns > now:
                changed[key] = used_ns = now - len(by_age) + place
            whole = disk_bytes(info.payload_bytes)
            self.add(key, info, used_ns if whole <= self.limit_bytes else 0)
        return changed

    def now(self, count: int = 1) -> int:
        """Take the time of last use for `count` chunks: this, and one nanosecond less for each.

        It is later than all times taken before, also when the clock was set back meanwhile.
        """
        self._latest_ns = max(time.time_ns(), self._latest_ns + count)
        return self._latest_ns

    def hide(self, key: str) -> None:
        """Let an entry, if there is one, count as room alone: until it is evicted or replaced."""
        if entry := self._entries.get(key):
            entry.hidden = True
            self._changed(key)

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one."""
        if entry := self._entries.pop(key, None):
            self.used_bytes -= entry.size_bytes
            self._changed(key)

    def mark(self, key: str, used_ns: int) -> bool:
        """Set an entry's time of last use; False if there is none."""
        if entry := self._entries.get(key):
            entry.used_ns = used_ns
        return entry is not None

    def pin(self, key: str) -> bool:
        """Keep an entry from eviction until as many `unpin`; False if there is none."""
        if key not in self:
            return False
        count = self._pins[key].count if self.pinned(key) else 0
        self._pins[key] = _Pin(count + 1, time.monotonic())
        return True

    def unpin(self, key: str) -> bool:
        """Take one pin back; False if there was none."""
        if not self.pinned(key):
            return False
        self._pins[key].count -= 1
        if not self._pins[key].count:
            del self._pins[key]
        return True

    def pinned(self, key: str) -> bool:
        """Whether a pin holds `key`; it stays when the entry goes."""
        pin = self._pins.get(key)
        if pin and time.monotonic() - pin.since >= self._pin_seconds:
            del self._pins[key]
            return False
        return pin is not None

    def unpinned(self) -> dict[str, ChunkInfo]:
        """All entries that no pin holds, hidden ones too."""
        return {key: e.info for key, e in self._entries.items() if not self.pinned(key)}

    def reserve(self, size_bytes: int) -> None:
        """Set room aside for a write under way."""
        self.reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back what a write has reserved."""
        self.reserved_bytes -= size_bytes

    def fits(self, need_bytes: int) -> bool:
        """Whether so much more has room now."""
        return self.used_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def can_fit(self, need_bytes: int) -> bool:
        """Whether so much more had room if all went that may go."""
        pins = [key for key in list(self._pins) if self.pinned(key)]
        pinned = [entry for key in pins if (entry := self._entries.get(key))]
        pinned_bytes = sum(entry.size_bytes for entry in pinned)
        return pinned_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def evict(self, need_bytes: int) -> Iterator[str]:
        """Keys to be removed, one after the other, until so much more has room.

        One that is still there afterwards comes again in its order, by its time of last use.
        """
        asked = []
        try:
            while self._by_age and not self.fits(need_bytes):
                used_ns, key = heapq.heappop(self._by_age)
                entry = self._entries.get(key)
                if entry is None:
                    continue  # removed since it was pushed
                if entry.used_ns != used_ns:
                    heapq.heappush(self._by_age, (entry.used_ns, key))
                    continue
                asked.append(key)
                if not self.pinned(key):
                    yield key
        finally:
            for key in asked:
                if entry := self._entries.get(key):
                    heapq.heappush(self._by_age, (entry.used_ns, key))
