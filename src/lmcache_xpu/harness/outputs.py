"""Files and directories that a long run writes to at its end: tried before it starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lmcache_xpu.errors import SettingsError


def check_file(path: Path, option: str) -> None:
    """Refuse a file that can't be written; its content stays as it is.

    Raises:
        SettingsError: names the option of the file, and the cause.
    """
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingsError(
            f"{option} {path}, which can't be written ({error.strerror})",
            "a file in a directory that exists and that this user may write to",
        ) from error


def make_directory(path: Path, option: str) -> None:
    """Make a directory where it is missing, and refuse one where nothing can be written.

    Raises:
        SettingsError: names the option of the directory, and the cause.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SettingsError(
            f"{option} {path}, where nothing can be written ({error.strerror})",
            "a directory that this user may write to",
        ) from error
