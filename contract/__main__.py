"""Compare what is declared with the sources of vLLM and LMCache."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from contract.comparison import compare, unexpected
from contract.declaration import checked, declared
from contract.extension import new_methods
from contract.report import report
from contract.sources import unpacked
from contract.uses import PACKAGES

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    vllm: Annotated[list[str] | None, typer.Option(help="A version of vLLM.")] = None,
    lmcache: Annotated[list[str] | None, typer.Option(help="A version of LMCache.")] = None,
    page: Annotated[Path | None, typer.Option("--report", help="A page to write.")] = None,
) -> None:
    """Say what versions have otherwise than contract/stubs declares it; without one, all of them.

    Sources come from PyPI, are kept in .contract/, and are only read.
    """
    asked = {"vllm": vllm or [], "lmcache": lmcache or []}
    if not any(asked.values()):
        asked = {package: checked(package) for package in PACKAGES}
    pairs = [(package, version) for package in PACKAGES for version in asked[package]]
    try:
        for pair in pairs:
            unpacked(*pair)
    except LookupError as error:
        typer.echo(f"contract: {error.args[0]}. Name one that is there.", err=True)
        raise typer.Exit(2) from None
    with ProcessPoolExecutor() as processes:
        changed = list(processes.map(_check, *zip(*pairs, strict=True)))
    for (package, version), texts in zip(pairs, changed, strict=True):
        count = sum(1 for _ in declared(package))
        typer.echo(
            f"{package} {version}: {count} names declared, "
            f"{len(texts) or 'no'} changes beside those in differences.toml"
        )
        for text in texts:
            typer.echo(f"  {text}")
    arrivals = {pair: _arrivals(*pair) for pair in pairs}
    for (package, version), names in arrivals.items():
        if version not in checked(package) and names:
            typer.echo(f"{package} {version}: new methods of classes that ours extend or hook")
            for name in names:
                typer.echo(f"  {name}")
    if page is not None:
        page.write_text(report(arrivals))
    raise typer.Exit(1 if any(changed) else 0)


def _check(package: str, version: str) -> list[str]:
    sources = unpacked(package, version)
    return unexpected(package, version, compare(package, version, sources))


def _arrivals(package: str, version: str) -> list[str]:
    """Return the new methods of a version since the one that is checked before it."""
    versions = sorted({*checked(package), version}, key=Version)
    before = {new: old for old, new in pairwise(versions)}.get(version)
    if before is None:
        return []
    return new_methods(package, unpacked(package, before), unpacked(package, version))


if __name__ == "__main__":
    app(prog_name="contract")
