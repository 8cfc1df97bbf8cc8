"""The chunks of a store: sizes, times of last use, and which one goes first. Knows no files."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes

_MOST_PLANNED = 8192
_PLANNED_NS = 60 * 10**9  # a prompt is stored within that, once it was looked up
_File = tuple[int, str, int]  # time of last use, name, and bytes of the payload


@dataclass(slots=True)
class Entry:
    """What the store knows of one chunk; of an earlier run's no key before its file is read."""

    info: ChunkInfo
    used_ns: int
    key: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes that its file takes on the disk."""
        return disk_bytes(self.info.payload_bytes)


class ChunkIndex:
    """Entries by names of files, within a size, least recently used first. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # bound on the next two
        self.used_bytes = 0  # of all entries
        self.reserved_bytes = 0  # of writes under way
        self._changed: Callable[[str], object] = lambda key: None
        self._entries: dict[str, Entry] = {}
        # Files of earlier runs that nobody has asked for: a million entries would take a second.
        self._earlier: dict[str, _File] = {}
        # Oldest first. An item may be out of date: the entry's own time decides, see `oldest`.
        self._by_age: list[_File] = []
        self._latest_ns = 0
        self._planned: dict[str, int] = {}  # times of last use of what is not stored yet

    def __contains__(self, name: str) -> bool:
        return name in self._earlier or name in self._entries  # in the order of `get`

    def __len__(self) -> int:
        return len(self._entries) + len(self._earlier)

    def names(self) -> list[str]:
        """Return all names."""
        return [*self._entries, *self._earlier]

    def get(self, name: str) -> Entry | None:
        """Return the entry of a name; it is made now for a file of an earlier run."""
        if file := self._earlier.get(name):
            # Before it leaves the other: some ask without a lock whether a name is here.
            self._entries[name] = Entry(ChunkInfo("", file[2]), file[0])
            del self._earlier[name]
        return self._entries.get(name)

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with every key now, and with a key whenever it comes or goes."""
        self._changed = changed
        for entry in self._entries.values():
            self._tell(entry)

    def add(self, name: str, info: ChunkInfo, used_ns: int, key: str = "") -> None:
        """Add an entry, in place of one of this name."""
        self.remove(name)
        self._entries[name] = entry = Entry(info, used_ns, key)
        heapq.heappush(self._by_age, (used_ns, name, info.payload_bytes))
        self.used_bytes += entry.size_bytes
        self._tell(entry)

    def add_earlier(self, files: list[_File]) -> dict[str, int]:
        """Add files of earlier runs, as used no later than now: the clock may have been ahead.

        Returns the times of last use that were changed for it.
        """
        sizes = Counter(map(itemgetter(2), files))  # a million files have few
        self.used_bytes += sum(disk_bytes(size) * count for size, count in sizes.items())
        if any(disk_bytes(size) > self.limit_bytes for size in sizes):  # these go first
            files = [
                (at if disk_bytes(size) <= self.limit_bytes else 0, name, size)
                for at, name, size in files
            ]
        self._earlier.update(zip(map(itemgetter(1), files), files, strict=True))
        self._by_age += files
        heapq.heapify(self._by_age)
        changed, now = {}, self.now()
        ahead = sorted(item for item in self._by_age if item[0] > now - len(self._by_age))
        first = now - len(ahead)
        for latest, (used_ns, name, size) in enumerate(ahead, first):  # keeps their order
            if used_ns > latest and (entry := self.get(name)):
                changed[name] = entry.used_ns = latest
                heapq.heappush(self._by_age, (latest, name, size))
        return changed

    def identify(self, name: str, key: str, info: ChunkInfo) -> None:
        """Set what the file of an earlier run says of itself."""
        if entry := self.get(name):
            entry.key, entry.info = key, info
            self._tell(entry)

    def now(self, count: int = 1) -> int:
        """Take times of last use for `count` chunks: this one, and each nanosecond before it.

        They are later than all that were taken before, even if the clock was set back.
        """
        self._latest_ns = max(time.time_ns(), self._latest_ns + count)
        return self._latest_ns

    def remove(self, name: str) -> None:
        """Remove an entry, if there is one."""
        if entry := self.get(name):
            del self._entries[name]
            self.used_bytes -= entry.size_bytes
            self._tell(entry)

    def mark(self, name: str, used_ns: int) -> bool:
        """Set an entry's time of last use; False if there is none, and then it is for the next."""
        self._planned.pop(name, None)
        if entry := self.get(name):
            entry.used_ns = used_ns
            return True
        self._planned[name] = used_ns
        if len(self._planned) > _MOST_PLANNED:
            del self._planned[next(iter(self._planned))]
        return False

    def time_of_use(self, name: str, used_ns: int | None) -> int:
        """Return when a chunk that is stored now counts as used: now if None, and not later."""
        now = self.now()
        planned_ns = self.planned(name, now if used_ns is None else min(used_ns, now))
        return now if used_ns is None else planned_ns

    def planned(self, name: str, used_ns: int) -> int:
        """Take the time that `mark` has set before there was an entry; else return this one."""
        planned_ns = self._planned.pop(name, used_ns)
        return planned_ns if planned_ns > used_ns - _PLANNED_NS else used_ns

    def fits(self, need_bytes: int) -> bool:
        """Whether so much more has room now."""
        return self.used_bytes + self.reserved_bytes + need_bytes <= self.limit_bytes

    def oldest(self) -> tuple[int, str] | None:
        """Return the time of last use and the name of what was used before all else."""
        while self._by_age:
            used_ns, name, size = self._by_age[0]
            entry = self.get(name)
            if entry is not None and entry.used_ns == used_ns:
                return used_ns, name
            heapq.heappop(self._by_age)
            if entry is not None:
                heapq.heappush(self._by_age, (entry.used_ns, name, size))
        return None

    def _tell(self, entry: Entry) -> None:
        if entry.key:
            self._changed(entry.key)
