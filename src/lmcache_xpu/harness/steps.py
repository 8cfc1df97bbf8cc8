"""Says what a long program is doing, and for how long it has been."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

SILENT_S = 10.0  # that a step goes on without a word


class Steps:
    """The steps of a program.

    Args:
        console: where they are shown.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._begin = console, time.monotonic()

    @contextmanager
    def doing(self, step: str) -> Iterator[None]:
        """Say when a step begins and ends, and meanwhile every `SILENT_S` that it goes on."""
        ended = threading.Event()
        with self._console.status(f"{step} ...") as status:

            def go_on() -> None:
                while not ended.wait(SILENT_S):
                    status.update(f"{step} ... {self._seconds()}")
                    if not self._console.is_terminal:
                        self._console.print(f"{self._seconds()}  ...")

            if not self._console.is_terminal:
                self._console.print(f"{step} ...")
            thread = threading.Thread(target=go_on, daemon=True)
            thread.start()
            try:
                yield
            except KeyboardInterrupt:
                self._console.print("Interrupted; the engine ends with it.")
                raise
            finally:
                ended.set()
                thread.join()
        self._console.print(f"[dim]{self._seconds()}[/dim]  {step}: done")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._begin:4.0f} s"
