"""What the commands end with: docs/reference/exit-codes.md, which a test holds complete."""

from __future__ import annotations

__all__ = ["BAD_NEWS", "MEANINGS"]

MEANINGS = {
    0: "Done",
    1: "The command ran, and what it has to say is bad",
    2: "A mistake in an option, a setting or a file, or an engine that did not come up: one line "
    "says what is the case and what to do",
    130: "Ended by Ctrl-C",
    143: "Ended by SIGTERM; what was started has been ended too",
}

# By command.
BAD_NEWS = {
    "doctor": "a check failed",
    "status": "with --url: something has to be mended at the running engine",
    "report": "a part failed or has bad news; the file says which",
    "bench engine": "an engine of this package did not start, or restored wrong bytes",
    "bench load": "an engine of this package failed",
}
