"""Make the tables of lmcache-options.md from the package's list; `make docs` runs it."""

from __future__ import annotations

from pathlib import Path

from lmcache_xpu.cache_engine.options import EXTRA, OPTIONS, VLLM, table

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/lmcache-options.md"


def page(text: str) -> str:
    """The page's text with the tables as they should be."""
    for name, options in {"options": OPTIONS, "extra": EXTRA, "vllm": VLLM}.items():
        begin, end = f"<!-- {name}: made by `make docs` -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}{table(options)}\n{end}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
