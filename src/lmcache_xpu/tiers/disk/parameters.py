"""The disk tier's settings, as LMCache's configuration holds them, and the directory they name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_LIMIT_BYTES
from lmcache_xpu.tiers import LOGGERS
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.lock import check_owner

logger = LOGGERS["disk"]


class DiskSettings(BaseModel):
    """The `disk.*` entries of LMCache's `extra_config`, or of its server's option.

    The path holds a directory for each engine or server, which may use so many GiB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str = Field(alias="disk.path", min_length=1)
    gib: float = Field(alias="disk.gib", gt=0, allow_inf_nan=False)
    threads: int = Field(4, alias="disk.threads", ge=1)  # reads at a time
    engine: int = Field(0, alias="disk.engine", ge=0)  # number among those that share the path

    @classmethod
    def parse(cls, entries: Mapping[str, object], *, alone: bool = False) -> Self:
        """Check the entries (`alone`: there are no others); SettingsError if one is wrong."""
        own = {name: value for name, value in entries.items() if alone or name.startswith("disk.")}
        try:
            return cls.model_validate(own)
        except ValidationError as error:
            [first, *_] = error.errors()
            name = str(first["loc"][0])
            raise SettingsError(
                f"{name}={entries.get(name)!r}",
                "disk.path, a directory on a local disk, disk.gib, and perhaps disk.threads",
                f"{first['msg']}.",
            ) from None

    @property
    def limit_bytes(self) -> int:
        """What one engine or server may use, bytes."""
        return int(self.gib * 2**30)

    def open_store(self, name: str) -> ChunkStore:
        """Open an engine's or a server's directory; SettingsError if it is in use, or of no use."""
        directory = Path(self.path) / name
        try:
            # Root's is right, too: what Kubernetes and Docker mount, or /var/cache.
            check_owner(Path(self.path), {0, os.geteuid()}, link=True)
        except OSError as error:
            raise SettingsError(
                f"disk.path={self.path!r} ({error.strerror})",
                "a directory of this user on a local disk",
            ) from error
        store = ChunkStore(directory, self.limit_bytes)
        DISK_LIMIT_BYTES.set(self.limit_bytes)
        used, free = store.counters["bytes"], shutil.disk_usage(directory).free
        logger.info(
            "disk tier: %d chunks of earlier runs, %.2f of %.2f GiB, in %s",
            *(len(store), used / 2**30, self.gib, directory),
        )
        if used + free < self.limit_bytes:
            logger.warning(
                "disk tier: disk.gib is %.2f, but only %.2f GiB can be had on that disk "
                "(docs: troubleshooting#disk-too-small)",
                *(self.gib, (used + free) / 2**30),
            )
        return store
