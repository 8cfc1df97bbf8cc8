"""The files that a run's figures go to: tried before the run, written after each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lmcache_xpu.bench.report import Page
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.outputs import check_file

__all__ = ["Outputs", "Page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The files that were asked for.

    Args:
        json_file: figures.
        report: one readable file with facts, tables and figures.
        plot_file: a picture.
    """

    json_file: Path | None = None
    report: Path | None = None
    plot_file: Path | None = None

    def check(self) -> None:
        """Refuse a file that can't be written, before anything is measured.

        Raises:
            SettingsError: names the first one, and the cause; or matplotlib is not installed.
        """
        options = {"--json": self.json_file, "--report": self.report, "--plot": self.plot_file}
        for option, path in options.items():
            if path is not None:
                check_file(path, option)
        if self.plot_file is None:
            return
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:
            raise SettingsError(
                "no matplotlib", "it to be installed for a plot", "pip install matplotlib"
            ) from None
        if self.plot_file.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
            raise SettingsError(
                f"--plot {self.plot_file}", "a file that ends in .png, .svg or .pdf"
            )

    def write(self, page: Page, machine: dict[str, str], command: str) -> list[str]:
        """Write the figures so far; one file that fails does not keep the others from it.

        Returns:
            A sentence for each file that could not be written.
        """
        figures = json.dumps(page.as_dict(machine, command), indent=1) + "\n"

        def write_report(path: Path) -> None:
            with path.open("w") as file:
                facts = Console(file=file, width=160)
                bench = " ".join(command.split()[:3])
                facts.print(f"# {bench}", highlight=False)
                for name, value in {**machine, "command": command}.items():
                    facts.print(f"{name}: {value}", markup=False, highlight=False)
                page.show(facts)
                file.write("\n" + figures)

        tasks: list[tuple[Path | None, Callable[[Path], object]]] = [
            (self.json_file, lambda path: path.write_text(figures)),
            (self.report, write_report),
            (self.plot_file, page.plot),
        ]
        failures = []
        for path, task in tasks:
            try:
                if path is not None:
                    task(path)
            except Exception as error:  # whatever it is, the other files are written
                failures.append(f"{path} was not written: {type(error).__name__}: {error}")
        return failures

    def name(self, console: Console) -> None:
        """Print the names of the files."""
        for path in (self.report, self.json_file, self.plot_file):
            if path is not None:
                console.print(f"Written: {path}", markup=False, highlight=False, soft_wrap=True)
