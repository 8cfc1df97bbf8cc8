"""The model that the disk tier's store is compared with: what it has to hold."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = 4096


def size_on_disk(payload: int) -> int:
    return HEADER + -(-payload // 4096) * 4096


@dataclass
class Chunk:
    """What is stored under a key. fate: what became of its file since."""

    payload: bytes
    used: int
    fate: str = ""  # gone, unreadable from the header on, or from the payload on

    @property
    def size(self) -> int:
        return size_on_disk(len(self.payload))


class Contents(dict[str, Chunk]):
    """Chunks by their keys, of `limit` bytes at most."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    @property
    def used(self) -> int:
        return sum(chunk.size for chunk in self.values())

    @property
    def whole(self) -> list[str]:
        return [key for key, chunk in sorted(self.items()) if not chunk.fate]

    def scan(self) -> None:
        """What a store that opens makes of the files: it reads headers and lengths."""
        for key in [key for key, chunk in self.items() if chunk.fate in ("gone", "header")]:
            del self[key]
        self.evict(0)

    def evict(self, need: int) -> bool:
        """The least recently used, until there is room."""
        if need > self.limit:
            return False
        while self.used + need > self.limit:
            del self[min(self, key=lambda key: (self[key].used, key))]
        return True
