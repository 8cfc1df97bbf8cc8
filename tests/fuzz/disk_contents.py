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
    is_read: bool = True  # its header, since the last start

    @property
    def size(self) -> int:
        return size_on_disk(len(self.payload))

    @property
    def goes_when_read(self) -> bool:
        return not self.is_read and self.fate in ("gone", "header")


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

    def scan(self, lengths: dict[str, int]) -> None:
        """What a store that opens makes of the files, by their lengths."""
        for key, chunk in list(self.items()):
            if (length := lengths.get(key, 0) - HEADER) < 0:
                del self[key]
                continue
            chunk.is_read = False
            if length != len(chunk.payload):
                chunk.payload = bytes(length)
        self.evict(0)

    def read_headers(self) -> None:
        """What a store makes of its files that reads all headers."""
        for key in [key for key, chunk in self.items() if chunk.goes_when_read]:
            del self[key]
        for chunk in self.values():
            chunk.is_read = True

    def evict(self, need: int) -> bool:
        """The least recently used, until there is room."""
        if need > self.limit:
            return False
        while self.used + need > self.limit:
            del self[min(self, key=lambda key: (self[key].used, key))]
        return True
