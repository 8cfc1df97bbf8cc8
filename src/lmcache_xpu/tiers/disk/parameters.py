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
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.lock import check_owner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DiskSettings", "check_hash"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_PREFIX = "disk."
_SERVER_NAMES = ("disk.path", "disk.gib", "disk.threads", "disk.engine")
_SERVER_DIRECTORY = "kv-server"


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The `disk.*` entries of LMCache's `extra_config`, or of its server's option.

    Args:
        path: directory that holds one directory for each worker, and one for a server.
        limit_bytes: what one worker, or the server, may use; `disk.gib` in bytes.
        threads: reads at a time.
        engine: number of the engine, of those that vLLM runs with data parallelism.
    """

    path: Path
    limit_bytes: int
    threads: int = 4
    engine: int = 0

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> DiskSettings:
        """Check and convert the entries.

        Raises:
            SettingsError: an entry is wrong, missing or unknown.
        """
        names = {"disk.path", "disk.gib", "disk.threads", "disk.engine"}
        unknown = {key for key in extra if key.startswith(_PREFIX)} - names
        if unknown:
            raise SettingsError(
                f"{', '.join(sorted(unknown))} in extra_config", f"of {sorted(names)}"
            )
        path, gib = extra.get("disk.path"), extra.get("disk.gib")
        threads = extra.get("disk.threads", 4)
        if not isinstance(path, str) or not path:
            raise SettingsError(f"disk.path={path!r}", "a directory", "Name one on a local disk.")
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < math.inf:
            raise SettingsError(f"disk.gib={gib!r}", "a number above 0, of GiB per worker")
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise SettingsError(f"disk.threads={threads!r}", "a whole number from 1 up")
        engine = extra.get("disk.engine", 0)
        if isinstance(engine, bool) or not isinstance(engine, int) or engine < 0:
            raise SettingsError(f"disk.engine={engine!r}", "a whole number from 0 up")
        return cls(Path(path), int(gib * 2**30), threads, engine)

    @classmethod
    def parse_server(cls, params: Mapping[str, object]) -> DiskSettings:
        """Check and convert the `adapter_params` of the server's option, see `server_option`.

        Raises:
            SettingsError: an entry is wrong, missing or unknown.
        """
        if unknown := sorted(params.keys() - set(_SERVER_NAMES)):
            raise SettingsError(
                f"{', '.join(unknown)} in adapter_params", f"of {', '.join(_SERVER_NAMES)}"
            )
        return cls.parse(params)

    @property
    def prefix(self) -> str:
        """The start of the names of this engine's directories; the worker's number follows."""
        return f"kv-engine-{self.engine}-worker-" if self.engine else "kv-worker-"

    def directory(self, worker_id: int) -> Path:
        """Where a worker's chunks are."""
        return self.path / f"{self.prefix}{worker_id}"

    def others(self, worker_id: int, world_size: int) -> list[Path]:
        """Return the directories of this engine's other workers, and of those that it had.

        Those that it had come first: their files move to the others.
        """
        numbers = self._left(world_size) + [n for n in range(world_size) if n != worker_id]
        return [self.directory(number) for number in numbers]

    def _left(self, world_size: int) -> list[int]:
        """Return the numbers of workers that there were once."""
        names = (path.name.removeprefix(self.prefix) for path in self.path.glob(f"{self.prefix}*"))
        numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
        return sorted(number for number in numbers if number >= world_size)

    def open_store(self, worker_id: int, world_size: int, pin_seconds: float) -> ChunkStore:
        """Open this worker's directory, and take over what workers left that no longer exist.

        Together it stays within the size. What another engine left stays where it is: it may only
        not have started yet.

        Raises:
            SettingsError: the directory can't be used, or another process uses it.
        """
        self._check_owner()
        left = [number for number in self._left(world_size) if number % world_size == worker_id]
        store = ChunkStore(
            self.directory(worker_id),
            self.limit_bytes,
            left=[self.directory(number) for number in left],
            pin_seconds=pin_seconds,
        )
        self._log_room(store)
        return store

    def open_server_store(self) -> ChunkStore:
        """Open the directory of LMCache's server; what workers keep beside it stays theirs.

        Raises:
            SettingsError: the directory can't be used, or another process uses it.
        """
        name = f"{_SERVER_DIRECTORY}-{self.engine}" if self.engine else _SERVER_DIRECTORY
        try:
            self._check_owner()
            store = ChunkStore(self.path / name, self.limit_bytes)
        except OSError as error:
            raise SettingsError(
                f"disk.path={str(self.path)!r} ({error.strerror})",
                "a directory of this user on a local disk",
            ) from error
        self._log_room(store)
        return store

    def _check_owner(self) -> None:
        # Root's is right, too: what Kubernetes and Docker mount, or /var/cache.
        check_owner(self.path, {0, os.geteuid()}, link=True)

    def _log_room(self, store: ChunkStore) -> None:
        used, free = store.counters.bytes, shutil.disk_usage(store.directory).free
        logger.info(
            "disk tier: %d chunks of earlier runs, %.2f of %.2f GiB, in %s",
            len(store),
            used / 2**30,
            self.limit_bytes / 2**30,
            store.directory,
        )
        if used + free < self.limit_bytes:
            logger.warning(
                "disk tier: disk.gib is %.2f, but only %.2f GiB can be had on that disk "
                "(docs: troubleshooting#disk-too-small)",
                self.limit_bytes / 2**30,
                (used + free) / 2**30,
            )


def check_hash(algorithm: str) -> None:
    """Raise SettingsError if LMCache's keys would differ after a restart."""
    seeded = os.environ.get("PYTHONHASHSEED", "random") != "random"
    if not seeded and not algorithm.startswith("sha256"):
        raise SettingsError(
            f"pre_caching_hash_algorithm={algorithm!r} without PYTHONHASHSEED",
            "keys that are the same after a restart",
            "Set it to 'sha256', or fix PYTHONHASHSEED.",
        )
