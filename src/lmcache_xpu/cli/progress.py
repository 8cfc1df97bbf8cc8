"""What a reader sees while a command works: one line on a terminal, and nothing in a file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from lmcache_xpu.errors import LMCacheXPUError


@contextmanager
def working(step: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it lasts, and keep what libraries print out of the answer.

    vLLM and LMCache log as soon as they are imported, from Python and from C. So standard output
    and standard error of this process are set aside meanwhile. What was printed is shown only
    where the block ends by a bug. The caller prints its answer after the block. Yields a function
    that shows another step.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    originals = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with (
        tempfile.TemporaryFile() as printed,
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
            ):
                yield lambda text: spinner.update(text=f"{text} ...")
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
