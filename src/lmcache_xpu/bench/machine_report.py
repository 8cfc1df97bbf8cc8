"""`lmcache-xpu report`: one file that says what runs on a machine, to send to this project.

Each part is a program in a process of its own: a driver that hangs or takes its process along costs
one part. A part that fails is an entry like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lmcache_xpu import __version__
from lmcache_xpu.bench.redaction import Redactor
from lmcache_xpu.bench.shapes import default_name, shape_named
from lmcache_xpu.launch.serve import METRICS_VARIABLE

COMMAND = "from lmcache_xpu.cli import app; app()"
MACHINE = """from lmcache_xpu.bench.runner import machine
for fact in machine().items(): print(*fact, sep=': ')"""
CHECK_S = 300.0
WORDS = {0: "ok", 1: "**bad news**: see below"}  # of exit codes
WIDTH = "1000"  # of lines: what is folded would not be recognised as something to hide


@dataclass(frozen=True, slots=True)
class Part:
    """A Python program with its arguments, and the seconds that it may take; None: any."""

    words: tuple[str, ...]
    limit_s: float | None = CHECK_S


@dataclass(slots=True)
class Outcome:
    """What became of a part: a word about it, the seconds that it took, and its output."""

    word: str = "not run"
    seconds: float = 0.0
    output: str = ""


def parts(directory: Path, *, quick: bool, timeout_s: float) -> dict[str, Part]:
    """Return all parts by name, the quickest first; some write a file NAME.json to a directory.

    With `quick` there are fewer requests, each once, and the standard mode alone. An engine may
    take `timeout_s` seconds to start, and for each answer.
    """
    shape = shape_named(default_name())
    verify, bench = (
        [*words, "--timeout-s", f"{timeout_s:.0f}", "--json", str(directory / f"{words[0]}.json")]
        for words in (["verify"], ["bench", "engine", "--shape", shape.name])
    )
    bench += ["--variant", "none", "--variant", "ours"]
    if quick:
        first, *_, last = shape.requests
        bench += ["--repeats", "1", "--row", first, "--row", last]
    else:
        bench += ["--variant", "ours-layerwise"]
    return {
        "machine": Part((MACHINE,)),
        "doctor": Part((COMMAND, "doctor")),
        "verify": Part((COMMAND, *verify), None),
        "bench": Part((COMMAND, *bench), None),
    }


class MachineReport:
    """The file, written anew before and after each part; parts write theirs to a directory."""

    def __init__(self, path: Path, command: str, redact: Redactor, directory: Path) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._path, self._command, self._redact, self._directory = path, command, redact, directory

    def run(self, parts: Mapping[str, Part], console: Console) -> bool:
        """Run all parts, and show a line for each that has ended; return whether all is well."""
        self.outcomes = {name: Outcome() for name in parts}
        for name, part in parts.items():
            outcome, begin = self.outcomes[name], time.monotonic()
            outcome.word = "was running when this was written"
            self._write()
            try:
                with console.status(name):
                    outcome.word, outcome.output = _run(part)
            except BaseException:  # Ctrl-C: the parts before stay
                outcome.word = "interrupted"
                raise
            finally:
                outcome.seconds = time.monotonic() - begin
                self._write()
            console.print(f"{name}: {outcome.word.replace('*', '')}, {outcome.seconds:.0f} s")
        return all(outcome.word == "ok" for outcome in self.outcomes.values())

    def _write(self) -> None:
        """Write the file: whole, or as it was."""
        written = self._path.with_name(f"{self._path.name}.part")
        written.write_text(self._text(), encoding="utf-8")
        written.replace(self._path)

    def _text(self) -> str:
        lines = [
            "# lmcache-xpu report",
            "",
            f"`{self._redact(self._command)}` of lmcache-xpu {__version__}, on "
            f"{time.strftime('%Y-%m-%d')}. Keys, passwords, names of machines and users, "
            "addresses and paths were taken out before this was written.",
            "",
            "| part | result | seconds |",
            "|---|---|---|",
        ]
        for name, outcome in self.outcomes.items():
            lines.append(f"| {name} | {outcome.word} | {outcome.seconds:.0f} |")
        for name, outcome in self.outcomes.items():
            text = self._redact(outcome.output) or f"{outcome.word}."
            lines += ["", f"## {name.capitalize()}", "", *_fenced(text)]
        for name in self.outcomes:
            with suppress(OSError, ValueError):  # it is not there yet, or never will be
                page = self._redact(json.loads((self._directory / f"{name}.json").read_text()))
                block = json.dumps(page, indent=1, ensure_ascii=False)
                lines += ["", f"## {name.capitalize()}, for programs", "", *_fenced(block, "json")]
        return "\n".join([*lines, ""])


def _fenced(text: str, kind: str = "text") -> list[str]:
    fence = "````" if "```" in text else "```"
    return [f"{fence}{kind}", text.rstrip(), fence]


def _run(part: Part) -> tuple[str, str]:
    """Return what became of a program, and its output."""
    environ = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", *part.words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ | {"COLUMNS": WIDTH},
    ) as process:
        try:
            output, _ = process.communicate(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return f"**failed**: no answer within {part.limit_s:.0f} s", output
        except BaseException:
            process.terminate()  # which ends its engines
            raise
    return WORDS.get(process.returncode, f"**failed**: exit code {process.returncode}"), output
