"""The disk tier's settings, as LMCache's configuration holds them, and the directory they name."""

from __future__ import annotations

import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_LIMIT_BYTES
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.lock import check_owner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DiskSettings"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_NAMES = ("disk.path", "disk.gib", "disk.threads", "disk.engine")


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The `disk.*` entries of LMCache's `extra_config`, or of its server's option.

    Args:
        path: directory that holds one directory for each engine or server.
        limit_bytes: what that may use; `disk.gib` in bytes.
        threads: reads at a time.
        engine: number among engines that share the path.
    """

    path: Path
    limit_bytes: int
    threads: int = 4
    engine: int = 0

    @classmethod
    def parse(cls, entries: Mapping[str, object], *, alone: bool = False) -> DiskSettings:
        """Check and convert the entries; `alone`, there may be no others.

        Raises SettingsError if one is wrong, missing or unknown.
        """
        names = {name for name in entries if alone or name.startswith("disk.")}
        if unknown := sorted(names.difference(_NAMES)):
            raise SettingsError(f"{', '.join(unknown)} of the disk tier", f"of {', '.join(_NAMES)}")
        path, gib = entries.get("disk.path"), entries.get("disk.gib")
        if not isinstance(path, str) or not path:
            raise SettingsError(f"disk.path={path!r}", "a directory", "Name one on a local disk.")
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < math.inf:
            raise SettingsError(f"disk.gib={gib!r}", "a number above 0, of GiB per worker")
        whole = {}
        for name, default, least in (("disk.threads", 4, 1), ("disk.engine", 0, 0)):
            value = entries.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingsError(f"{name}={value!r}", f"a whole number from {least} up")
            whole[name] = value
        return cls(Path(path), int(gib * 2**30), whole["disk.threads"], whole["disk.engine"])

    def open_store(self, name: str) -> ChunkStore:
        """Open the directory of this name in the path, for one engine or server.

        Raises SettingsError if it can't be used, or another process uses it.
        """
        directory = self.path / name
        try:
            # Root's is right, too: what Kubernetes and Docker mount, or /var/cache.
            check_owner(self.path, {0, os.geteuid()}, link=True)
        except OSError as error:
            raise SettingsError(
                f"disk.path={str(self.path)!r} ({error.strerror})",
                "a directory of this user on a local disk",
            ) from error
        store = ChunkStore(directory, self.limit_bytes)
        DISK_LIMIT_BYTES.set(self.limit_bytes)
        used, free = store.counters["bytes"], shutil.disk_usage(directory).free
        logger.info(
            "disk tier: %d chunks of earlier runs, %.2f of %.2f GiB, in %s",
            len(store),
            used / 2**30,
            self.limit_bytes / 2**30,
            directory,
        )
        if used + free < self.limit_bytes:
            logger.warning(
                "disk tier: disk.gib is %.2f, but only %.2f GiB can be had on that disk "
                "(docs: troubleshooting#disk-too-small)",
                self.limit_bytes / 2**30,
                (used + free) / 2**30,
            )
        return store
