"""Check of the packages that vLLM and LMCache share; LMCache's wheel asks for older ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lmcache_xpu import versions
from lmcache_xpu.doctor.check import Check, fail, ok, skip, warn

INSTALL = "python3 scripts/install.py"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package.

    Args:
        version: its version with its build suffix.
        requires: its requirements, as its metadata has them.
    """

    version: str
    requires: tuple[str, ...] = ()


def installed() -> dict[str, Package]:
    """Return all packages by their canonical names, read from metadata (imports nothing)."""
    return {
        canonicalize_name(each.name): Package(each.version, tuple(each.requires or ()))
        for each in reversed(list(metadata.distributions()))  # the first on the path wins
    }


def check_packages(packages: Mapping[str, Package]) -> Check:
    """Check that the shared packages are as vLLM wants them.

    A plain `pip install` of LMCache takes them back to what LMCache's wheel asks for. Fails where
    vLLM's own requirements are broken; warns where those of another package are, and where vLLM for
    Intel GPUs has older packages than its image.
    """
    name = "packages"
    vllm = next((n for n in versions.BUILDS_OF_VLLM if n in packages), None)
    if vllm is None:
        return skip(name, "vLLM is not installed as a package here")
    shared = sorted(versions.SHARED_PACKAGES & packages.keys())
    version, _, build = packages[vllm].version.partition("+")
    pins = versions.IMAGE_PACKAGES.get(version, {}) if build == "xpu" else {}
    older = [
        (package, pin)
        for package, pin in pins.items()
        if package in packages and Version(packages[package].version) < Version(pin)
    ]
    broken = [
        (package, *requirement)
        for package in (vllm, *shared)
        for requirement in _broken(packages[package], packages, shared)
    ]
    if not broken and not older:
        return ok(name, ", ".join(f"{n} {packages[n].version}" for n in shared))
    text = [
        f"{package} {packages[package].version} wants {requirement}, and here is {version}"
        for package, requirement, version in broken
    ]
    text += [f"{n} {packages[n].version}, older than {pin} of vLLM's image" for n, pin in older]
    install = [f"'{n}=={pin}'" for n, pin in older] or [
        f"'{requirement}'" for _, requirement, _ in broken
    ]
    advice = (
        f"pip install {' '.join(dict.fromkeys(install))}. A plain `pip install` of LMCache takes "
        f"vLLM's packages back; `{INSTALL}` in a clone of lmcache-xpu leaves them."
    )
    outcome = fail if any(package == vllm for package, *_ in broken) else warn
    return outcome(name, "; ".join(text), advice)


def _broken(
    package: Package, packages: Mapping[str, Package], shared: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each requirement of a shared package that is broken, and the version that does it."""
    for requirement in map(Requirement, package.requires):
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in shared and applies:
            version = packages[name].version
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{name}{requirement.specifier}", version
