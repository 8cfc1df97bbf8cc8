"""Sources of vLLM and LMCache: those on PyPI, unpacked, and the installed ones."""

from __future__ import annotations

import io
import subprocess
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import httpx
from uv import find_uv_bin

CACHE = Path(__file__).parents[1] / ".contract"


def installed() -> Path:
    """Return the folder in which the installed packages are."""
    return Path(sysconfig.get_path("purelib"))


def unpacked(package: str, version: str) -> Path:
    """Return the folder that holds a version's Python files; downloads them the first time.

    Of a source distribution: it holds the files for every device, and needs no wheel for this
    machine. Only the Python files are kept.

    Raises:
        LookupError: the index has no source distribution of this version.
    """
    folder = CACHE / f"{package}-{version}"
    if not folder.exists():
        archive = download(package, version)
        unpack(archive, package, partial := folder.with_suffix(".partial"))
        partial.rename(folder)
    return folder


def download(package: str, version: str) -> bytes:
    """Return a source distribution from the index that uv is configured with."""
    command = [find_uv_bin(), "pip", "compile", "-q", "--no-deps", "--format", "pylock.toml", "-"]
    pinned = f"{package}=={version}"
    done = subprocess.run(command, input=pinned, capture_output=True, text=True)
    if done.returncode:
        raise LookupError(f"uv finds no {pinned} ({done.stderr.partition(chr(10))[0]})")
    [locked] = tomllib.loads(done.stdout)["packages"]
    if "sdist" not in locked:
        raise LookupError(f"{pinned} has no source distribution")
    url = locked["sdist"]["url"]
    return httpx.get(url, timeout=120, follow_redirects=True).raise_for_status().content


def unpack(archive: bytes, package: str, folder: Path) -> None:
    """Write the Python files of a package out of its source distribution."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for member in opened:
            _, _, name = member.name.partition("/")
            if not (member.isfile() and name.startswith(f"{package}/") and name.endswith(".py")):
                continue
            content = opened.extractfile(member)
            assert content is not None
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{member.name} leads out of its archive")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
