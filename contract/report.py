"""The page of what differs between versions, for docs/results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from contract.declaration import checked, declared, differences, moves
from contract.uses import PACKAGES, place

__all__ = ["report"]


def report(arrivals: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the page.

    Args:
        arrivals: new methods, by package and version.
    """
    counts = {package: sum(1 for _ in declared(package)) for package in PACKAGES}
    lines = [
        "# What moved between versions of vLLM and LMCache",
        "",
        f"{date.today():%Y-%m-%d}, by `make contract`, from the sources on PyPI; nothing was run.",
        f"This package uses {counts['vllm']} names of vLLM and {counts['lmcache']} of LMCache:",
        "classes, methods, attributes. `contract/stubs` declares them, with their parameters.",
        "What is not in the first two tables is as declared in all of these:",
        "",
        "| | versions |",
        "|---|---|",
        *(f"| {package} | {', '.join(checked(package))} |" for package in PACKAGES),
        "",
        "A name may stay while what it does changes. Only tests with an engine can tell that.",
        "",
        "## Names that some versions lack, or have with other parameters",
        "",
        "| name | there in | used in | without it |",
        "|---|---|---|---|",
    ]
    for each in differences():
        dotted, _, parameter = each.name.partition("(")
        short = ".".join(dotted.split(".")[-2:]) + (f"({parameter}" if parameter else "")
        used = place(parameter.rstrip(")") if parameter else dotted).partition(":")[0]
        used = used.removeprefix("src/lmcache_xpu/")
        lines.append(f"| `{short}` | {each.versions} | `{used}` | {each.bridge} |")
    lines += ["", "## Packages that moved", ""]
    lines += ["| package | now in | in versions | |", "|---|---|---|---|"]
    lines += [f"| `{m.old}` | `{m.new}` | {m.versions} | {m.bridge} |" for m in moves()]
    lines += [
        "",
        "## New methods",
        "",
        "These came to classes that this package extends or hooks. Nothing breaks by them, as the",
        "class has a default. Whether the default is right is for a person to see.",
        "",
        "| version | methods |",
        "|---|---|",
    ]
    for (package, version), names in arrivals.items():
        if names:
            short = ", ".join(f"`{'.'.join(name.split('.')[-2:])}`" for name in names)
            lines.append(f"| {package} {version} | {short} |")
    return "\n".join(lines) + "\n"
