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
from lmcache_xpu.tiers.disk.chunk_store import PIN_SECONDS, ChunkStore
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
        path: directory that holds one directory for LMCache's own engine, and one for a server.
        limit_bytes: what that engine, or the server, may use; `disk.gib` in bytes.
        threads: reads at a time.
        engine: number of the engine, of those that vLLM runs with data parallelism.
    """

    path: Path
    limit_bytes: int
    threads: int = 4
    engine: int = 0

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> DiskSettings:
        """Check and convert the entries. Raises SettingsError if one is wrong or missing."""
        unknown = {key for key in extra if key.startswith("disk.")}.difference(_NAMES)
        if unknown:
            raise SettingsError(
                f"{', '.join(sorted(unknown))} in extra_config", f"of {sorted(_NAMES)}"
            )
        path, gib = extra.get("disk.path"), extra.get("disk.gib")
        if not isinstance(path, str) or not path:
            raise SettingsError(f"disk.path={path!r}", "a directory", "Name one on a local disk.")
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < math.inf:
            raise SettingsError(f"disk.gib={gib!r}", "a number above 0, of GiB per worker")
        threads = _whole_number("disk.threads", extra.get("disk.threads", 4), 1)
        engine = _whole_number("disk.engine", extra.get("disk.engine", 0), 0)
        return cls(Path(path), int(gib * 2**30), threads, engine)

    @classmethod
    def parse_server(cls, params: Mapping[str, object]) -> DiskSettings:
        """Do so with the `adapter_params` of the server's option, which has no other entries."""
        if unknown := sorted(params.keys() - set(_NAMES)):
            raise SettingsError(
                f"{', '.join(unknown)} in adapter_params", f"of {', '.join(_NAMES)}"
            )
        return cls.parse(params)

    def open_store(self, pin_seconds: float) -> ChunkStore:
        """Open the directory of LMCache's own engine, of which pins last `pin_seconds`.

        Raises SettingsError if the directory can't be used, or another process uses it.
        """
        name = f"kv-engine-{self.engine}-worker-0" if self.engine else "kv-worker-0"
        return self._open(self.path / name, pin_seconds)

    def open_server_store(self) -> ChunkStore:
        """Open the directory of LMCache's server, as `open_store` does."""
        return self._open(self.path / (f"kv-server-{self.engine}" if self.engine else "kv-server"))

    def open_offloading_store(self) -> ChunkStore:
        """Open the directory of vLLM's own offloading, as `open_store` does."""
        return self._open(self.path / f"kv-vllm-{self.engine}")

    def _open(self, directory: Path, pin_seconds: float = PIN_SECONDS) -> ChunkStore:
        try:
            # Root's is right, too: what Kubernetes and Docker mount, or /var/cache.
            check_owner(self.path, {0, os.geteuid()}, link=True)
            store = ChunkStore(directory, self.limit_bytes, pin_seconds=pin_seconds)
        except OSError as error:
            raise SettingsError(
                f"disk.path={str(self.path)!r} ({error.strerror})",
                "a directory of this user on a local disk",
            ) from error
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


def _whole_number(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name}={value!r}", f"a whole number from {least} up")
    return value
