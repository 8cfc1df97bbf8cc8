"""Files and directories that a long run writes to at its end: tried before it starts."""

from __future__ import annotations

from pathlib import Path

from lmcache_xpu.errors import SettingsError

__all__ = ["check_file", "make_directory"]


def check_file(path: Path, option: str) -> None:
    """Refuse a file that can't be written; its content stays as it is.

    Args:
        path: the file.
        option: the option that named it, for the message.

    Raises:
        SettingsError: its directory is missing, or this user may not write it.
    """
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingsError(
            f"{option} {path}, which can't be written ({error.strerror})",
            "a file in a directory that exists and that this user may write to",
            f"Make the directory {path.parent}, or name another file."
            if not path.parent.exists()
            else "Name another file.",
        ) from error


def make_directory(path: Path, option: str) -> None:
    """Make a directory where it is missing, and refuse one where nothing can be written.

    Args:
        path: the directory.
        option: the option that named it, for the message.

    Raises:
        SettingsError: it can't be made, or this user may not write to it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingsError(
            f"{option} {path}, where nothing can be written ({error.strerror})",
            "a directory that this user may write to",
            "Name another.",
        ) from error
