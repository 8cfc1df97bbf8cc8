"""Check of the packages that vLLM and LMCache share; LMCache's wheel asks for older ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lmcache_xpu import versions
from lmcache_xpu.doctor.check import Check, fail, ok, skip, warn

__all__ = ["Package", "check_packages", "installed"]

INSTALL = "python3 scripts/install.py"


@dataclass(frozen=True, slots=True)
class Package:
    """One that is installed.

    Args:
        version: with its build suffix.
        requires: what it asks for, as its metadata has it.
    """

    version: str
    requires: tuple[str, ...] = ()


def installed() -> dict[str, Package]:
    """All packages by their canonical names, read from metadata (imports nothing)."""
    return {
        canonicalize_name(each.name): Package(each.version, tuple(each.requires or ()))
        for each in reversed(list(metadata.distributions()))  # the first on the path wins
    }


def check_packages(packages: Mapping[str, Package]) -> Check:
    """Whether the shared packages are as vLLM wants them.

    A plain `pip install` of LMCache takes them back to what LMCache's wheel asks for. Fails where
    vLLM's own requirements are broken; warns where those of another package are, and where vLLM for
    Intel GPUs has older packages than its image.
    """
    name = "packages"
    vllm = next((n for n in versions.DISTRIBUTIONS["vllm"] if n in packages), None)
    if vllm is None:
        return skip(name, "vLLM is not installed as a package here")
    version, _, build = packages[vllm].version.partition("+")
    wanted = versions.IMAGE_PACKAGES.get(version, {}) if build == "xpu" else {}
    broken = list(_broken(packages, vllm))
    older = [
        (shared, pin)
        for shared, pin in wanted.items()
        if shared in packages and Version(packages[shared].version) < Version(pin)
    ]
    if not broken and not older:
        return ok(name, ", ".join(f"{n} {packages[n].version}" for n in _shared(packages)))
    text = [f"{who} wants {what}, and here is {there}" for who, what, there in broken]
    text += [f"{n} {packages[n].version}, older than {pin} of vLLM's image" for n, pin in older]
    install = [f"'{n}=={pin}'" for n, pin in older] or [f"'{what}'" for _, what, _ in broken]
    advice = (
        f"pip install {' '.join(dict.fromkeys(install))}. A plain `pip install` of LMCache takes "
        f"vLLM's packages back; `{INSTALL}` in a clone of lmcache-xpu leaves them."
    )
    outcome = fail if any(who.startswith(f"{vllm} ") for who, *_ in broken) else warn
    return outcome(name, "; ".join(text), advice)


def _shared(packages: Mapping[str, Package]) -> list[str]:
    return sorted(name for name in versions.SHARED_PACKAGES if name in packages)


def _broken(packages: Mapping[str, Package], vllm: str) -> Iterator[tuple[str, str, str]]:
    """Who asks for what, and the version that is there instead; of vLLM and the shared ones."""
    shared = _shared(packages)
    for who in (vllm, *shared):
        for text in packages[who].requires:
            requirement = Requirement(text)
            what = canonicalize_name(requirement.name)
            if what not in shared or (
                requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            ):
                continue
            version = packages[what].version
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{who} {packages[who].version}", f"{what}{requirement.specifier}", version
