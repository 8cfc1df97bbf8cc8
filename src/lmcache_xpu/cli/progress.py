"""What a reader sees while a command works: a line on a terminal, and parts of the answer."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

from lmcache_xpu.errors import LMCacheXPUError


@dataclass(frozen=True, slots=True)
class Progress:
    """The line that a terminal shows, and standard output as it was before the work."""

    _live: Live
    _spinner: Spinner
    _answer: Console

    def __call__(self, step: str) -> None:
        """Show another step."""
        self._spinner.update(text=f"{step} ...")

    def print(self, part: RenderableType) -> None:
        """Print a part of the answer at once, above the line."""
        self._live.stop()
        self._answer.print(part)
        self._live.start()


@contextmanager
def working(step: str) -> Iterator[Progress]:
    """Show a step while it lasts, and keep what libraries print out of the answer.

    vLLM and LMCache log as soon as they are imported, from Python and from C. So standard output
    and standard error of this process are set aside meanwhile. What was printed is shown only
    where the block ends by a bug. The caller prints its answer after the block, or parts of it by
    what this yields.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    originals = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with (
        tempfile.TemporaryFile() as printed,
        os.fdopen(os.dup(1), "w", encoding="utf-8") as answer,
        os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal,
    ):
        for descriptor in originals:
            os.dup2(printed.fileno(), descriptor)
        failed = False
        try:
            spinner = Spinner("dots", f"{step} ...")
            console = Console(file=terminal, quiet=not terminal.isatty())
            # Not `console.status`: it takes sys.stdout and sys.stderr, and prints what others log.
            with Live(
                spinner,
                console=console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live:
                yield Progress(live, spinner, Console(file=answer, highlight=False))
        except Exception as error:
            failed = not isinstance(error, LMCacheXPUError)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in originals.items():
                os.dup2(original, descriptor)
                os.close(original)
            if failed:
                printed.seek(0)
                os.write(2, printed.read())
