"""Make the pages of docs/reference that follow from the code: `make docs` runs it.

A page is made as a whole, or between two comments where people write the rest of it. The long ones
have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import commands_page
import metrics_page
import settings_page
from environment import ROOT
from markdown_table import rows

REFERENCE = ROOT / "docs/reference"

# Exit codes

MEANINGS = {
    0: "Done",
    1: "The command ran, and what it has to say is bad",
    2: "A mistake in an option, a setting or a file, or an engine that did not come up: one line "
    "says what is the case and what to do",
    3: "Nothing is proven: `lmcache-xpu verify` saw no hit",
    130: "Ended by Ctrl-C",
    143: "Ended by SIGTERM; what was started has been ended too",
}
BAD_NEWS = {  # by command
    "doctor": "a check failed",
    "status": "with --url: something is wrong with the running engine",
    "report": "a part failed or has bad news; the file says which",
    "verify": "something differs from what was computed; with --acquit: of three engines, only the "
    "one with the connector",
    "bench engine": "an engine of this package did not start, or restored wrong bytes",
    "bench load": "an engine of this package failed",
}


def exit_codes_page(text: str) -> str:
    """docs/reference/exit-codes.md."""
    codes = ((str(code), f"{meaning}.") for code, meaning in MEANINGS.items())
    news = ((f"`lmcache-xpu {name}`", f"{text}.".capitalize()) for name, text in BAD_NEWS.items())
    return f"""# Exit codes

What does a command end with, and what does that mean?

{rows(("code", "meaning"), codes)}

These commands end with 1, where:

{rows(("command", "bad news"), news)}

`lmcache-xpu serve` becomes vLLM once its checks are done: from then on the exit code is vLLM's.
Ctrl-C on a terminal while vLLM starts ends it with 130, in one line.

`make loadtest`, `make loadtest-compare` and `make capacity` use the same codes for their programs.
make itself reports any failure as 2.
"""


PAGES: dict[str, Callable[[str], str]] = {
    "settings.md": settings_page.page,
    "metrics.md": metrics_page.page,
    "commands.md": commands_page.page,
    "exit-codes.md": exit_codes_page,
}


def main() -> None:
    """Renew all pages."""
    for name, page in PAGES.items():
        path = REFERENCE / name
        path.write_text(page(path.read_text() if path.exists() else ""))


if __name__ == "__main__":
    main()
