"""Make the pages' parts on accepted versions, from what `make matrix` kept: `make docs` runs it."""

from __future__ import annotations

from collections.abc import Callable

from environment import ROOT
from markdown_table import rows
from matrix import Result, results

from lmcache_xpu.versions import TESTED

BEGIN = "<!-- versions: made by `make docs` -->\n"
END = "<!-- end of versions -->"
# What is kept of a version, by pytest's `-k`.
SELECTIONS = {
    "": "all tests of that day",
    "test_local": "cache in the engine's process alone",
    "test_stock": "LMCache's own engine alone",
    "shared_tier": "shared tier alone",
    "vllm_offloading": "behind vLLM's own offloading alone",
}


def pytorch(result: Result) -> str:
    """Return a result's PyTorch, with its build where that is not the one for CPU."""
    version, _, build = result.torch.partition("+")
    return version if build == "cpu" else f"{version} (PyPI's build)"


def version(result: Result) -> str:
    """Return a result's version of vLLM, with that of its compiled part where it is another."""
    if result.extension == result.vllm:
        return result.vllm
    return f"{result.vllm} (its Python, {result.extension}'s extension)"


def outcome(result: Result) -> str:
    """Return how a result's tests ended, and when."""
    return f"{result.passed}, {result.failed} ({result.seconds} s, {result.date})"


def matrix_table() -> str:
    """Return what ran on each version, and when; a column for each."""
    kept: dict[str, dict[str, Result]] = {}
    for result in results():
        kept.setdefault(result.vllm, {})[result.tests] = result
    last = [next(reversed(by_tests.values())) for by_tests in kept.values()]
    body = {"LMCache, PyTorch": [f"{result.lmcache}, {pytorch(result)}" for result in last]}
    for tests, name in SELECTIONS.items():
        ran = [by_tests.get(tests) for by_tests in kept.values()]
        if any(ran):
            body[f"{name}: passed, failed"] = [outcome(result) if result else "" for result in ran]
    head = ("vLLM", *map(version, last))
    return rows(head, ((name, *cells) for name, cells in body.items()))


def accepted_table() -> str:
    """Return which versions are accepted."""
    names = {"vLLM": "vllm", "LMCache": "lmcache"}
    body = [(name, ", ".join(TESTED[package])) for name, package in names.items()]
    return rows(("", "accepted"), [*body, ("Python", "3.11 to 3.14")])


def versions_tables() -> str:
    """Return which versions are accepted, and what ran on each of vLLM's."""
    heading = "Each accepted vLLM was tested on CPU, with its faults planted (`make matrix`):"
    return f"{accepted_table()}\n\n{heading}\n\n{matrix_table()}"


PARTS: dict[str, Callable[[], str]] = {
    "docs/faq.md": accepted_table,
    "docs/reference/models.md": versions_tables,
}


def renewed(text: str, part: str) -> str:
    """Return a page's text with the part between the comments made anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{part}\n\n{END}{tail}"


def main() -> None:
    """Renew all parts."""
    for name, part in PARTS.items():
        path = ROOT / name
        path.write_text(renewed(path.read_text(), part()))


if __name__ == "__main__":
    main()
