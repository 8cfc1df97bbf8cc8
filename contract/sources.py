"""Sources of vLLM and LMCache: those on PyPI, unpacked, and the installed ones."""

from __future__ import annotations

import io
import sysconfig
import tarfile
from pathlib import Path

import httpx

INDEX = "https://pypi.org/simple"
CACHE = Path(__file__).parents[1] / ".contract"


def installed() -> Path:
    """Return the folder in which the installed packages are."""
    return Path(sysconfig.get_path("purelib"))


def unpacked(package: str, version: str) -> Path:
    """Return the folder that holds a version's Python files; downloads them the first time.

    Of a source distribution: it holds the files for every device, and needs no wheel for this
    machine. Only the Python files are kept.

    Raises:
        LookupError: PyPI has no source distribution of this version.
    """
    folder = CACHE / f"{package}-{version}"
    if not folder.exists():
        archive = download(package, version)
        unpack(archive, package, partial := folder.with_suffix(".partial"))
        partial.rename(folder)
    return folder


def download(package: str, version: str) -> bytes:
    """Return a source distribution from PyPI."""
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with httpx.Client(timeout=120, follow_redirects=True) as client:
        listing = client.get(f"{INDEX}/{package}/", headers=headers).raise_for_status().json()
        name = f"{package}-{version}.tar.gz"
        urls = [file["url"] for file in listing["files"] if file["filename"] == name]
        if not urls:
            raise LookupError(f"PyPI has no {name}")
        return client.get(urls[0]).raise_for_status().content


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
