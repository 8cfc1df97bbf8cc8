"""What a reader sees while a command works, and how its answers are worded."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from lmcache_xpu.errors import LMCacheXPUError


@contextmanager
def working(step: str) -> Iterator[Console]:
    """Name a step on a terminal, and keep what libraries print out of the answer.

    vLLM and LMCache log as soon as they are imported, from Python and from C. So standard output
    and standard error of this process are set aside meanwhile. What was printed is shown only
    where the block ends by a bug. The caller prints its answer after the block, or parts of it to
    the console that this yields.
    """
    if os.isatty(2):
        print(f"{step} ...", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    originals = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with (
        tempfile.TemporaryFile() as printed,
        os.fdopen(os.dup(1), "w", encoding="utf-8") as answer,
    ):
        for descriptor in originals:
            os.dup2(printed.fileno(), descriptor)
        failed = False
        try:
            yield Console(file=answer, highlight=False)
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


def count(number: int, noun: str) -> str:
    """Return a number and what is counted, in the plural but for one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
