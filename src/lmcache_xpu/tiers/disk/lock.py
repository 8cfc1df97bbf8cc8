"""A directory of this user's alone, with one process at a time in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

from lmcache_xpu.errors import SettingsError

_OWN = "of the user that runs this process, and no link"


class DirectoryLock:
    """Holds `directory`, made if it is missing, from construction until `release`, through flock.

    The file `lock` in it is locked, too, as by the first engines alone, and names the last holder.
    The directory's mode becomes 0700. Paths by `at` lead into it, whatever the owner of a parent
    puts in its place.

    Waits some seconds for another holder, e.g. an engine that is shutting down. Raises
    SettingsError if the directory can't be made or used, another holds it, or it or its lock file
    is a link or another user's.
    """

    def __init__(self, directory: Path, wait_seconds: float) -> None:
        self._directory = directory
        self._path = directory  # by which it is reached
        self._fds: list[int] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
            self._wait(wait_seconds)
        except OSError as error:
            self.release()
            raise SettingsError(
                f"directory {directory}: {error.strerror}",
                "one that this user owns, or may create, and can write to",
            ) from error
        except SettingsError:
            self.release()
            raise
        self.descriptor = self._fds[0]
        self._path = Path(f"/proc/self/fd/{self.descriptor}")

    @property
    def is_held(self) -> bool:
        """Whether it was not released yet."""
        return bool(self._fds)

    def at(self, name: str) -> Path:
        """Return the path of a file in the directory; once it is released, by the usual path."""
        return self._path / name

    def again(self) -> DirectoryLock:
        """Return this lock, or another where the directory was removed, and is made again.

        Raises OSError if it can't be, or if another process holds it; then this one stays.
        """
        path = self._directory
        if not self._fds or (path.is_dir() and path.samefile(self._path)):
            return self
        try:
            lock = DirectoryLock(path, 0)
        except SettingsError as error:
            raise OSError(str(error)) from error
        self.release()
        return lock

    def release(self) -> None:
        """Let go; may be called twice."""
        self._path = self._directory
        while self._fds:
            os.close(self._fds.pop())

    def _open(self) -> None:
        check_owner(self._directory, {os.geteuid()}, link=False)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fds.append(os.open(self._directory, flags))
        if os.fstat(self._fds[0]).st_uid != os.geteuid():  # replaced since
            raise SettingsError(f"directory {self._directory} of another user", _OWN)
        os.fchmod(self._fds[0], 0o700)
        # A pipe of this name must not block, and its reader must not be this process.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fds.append(os.open("lock", flags, 0o600, dir_fd=self._fds[0]))
        file = os.fstat(self._fds[1])
        if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or file.st_nlink != 1:
            raise SettingsError(f"{self._directory}/lock", f"a file {_OWN}")

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                for fd in reversed(self._fds):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._fds[1], 32, 0).decode(errors="replace")
                    raise SettingsError(
                        f"directory {self._directory} in use by process {holder}",
                        "one directory for each process",
                        "Stop that process, or give this one another directory.",
                    ) from None
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # a full disk; the holder's name is help alone
            os.ftruncate(self._fds[1], 0)
            os.pwrite(self._fds[1], str(os.getpid()).encode(), 0)


def check_owner(directory: Path, users: set[int], *, link: bool) -> None:
    """Raise SettingsError for a directory of others than these users: they could replace it.

    It need not exist, and with `link` it may be a link of one of these owners.
    """
    with contextlib.suppress(FileNotFoundError):
        owners = {directory.lstat().st_uid, directory.stat().st_uid}
        if owners <= users and (link or not directory.is_symlink()):
            return
        raise SettingsError(
            f"directory {directory} of user {', '.join(map(str, sorted(owners - users)))}"
            if owners - users
            else f"directory {directory} is a link",
            _OWN,
            "Remove it, give it to that user (chown), or name another directory.",
        )
