"""Tables of the pages that are made, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def rows(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *body]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return text.replace("\n", " ").replace("|", "\\|")
