"""`lmcache-xpu report`: one file that says what runs on a machine, to send to this project.

The file is written anew after each part, of which each runs in processes of its own: a driver that
hangs or takes its process along costs one part. A part that fails is an entry like any other.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lmcache_xpu import __version__
from lmcache_xpu.bench import runner
from lmcache_xpu.bench.jobs import row_jobs
from lmcache_xpu.bench.redaction import Redactor
from lmcache_xpu.bench.report import Figures
from lmcache_xpu.bench.shapes import Shape, shape_named
from lmcache_xpu.bench.variants import variants_named
from lmcache_xpu.errors import EngineError
from lmcache_xpu.launch.serve import METRICS_VARIABLE, built_for

__all__ = ["MachineReport", "Part", "PartResult", "parts"]

Show = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
# Does a part; takes a function that shows what it does, and one that saves facts so far. Returns
# whether all is well, and the facts. A fact called `text` is shown to readers.
Part = Callable[[Show, Save], tuple[bool, dict[str, Any]]]
Outcome = Literal["not run", "running", "ok", "bad", "failed", "interrupted"]

MACHINE = "import json; from lmcache_xpu.bench.runner import machine; print(json.dumps(machine()))"
DOCTOR = "from lmcache_xpu.cli import app; app(['doctor', '--json'])"
DOCTOR_S = 300.0

_OUTCOMES: dict[Outcome, str] = {
    "not run": "not run",
    "running": "was running when this was written",
    "ok": "ok",
    "bad": "**bad news**: see below",
    "failed": "**failed**: see below",
    "interrupted": "interrupted",
}


@dataclass(slots=True)
class PartResult:
    """What became of a part.

    Args:
        outcome: of the part; bad: it ran and has bad news; failed: it did not run to its end.
        seconds: that it took.
        facts: what it measured, as JSON has it.
        error: why it failed.
    """

    outcome: Outcome = "not run"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class MachineReport:
    """The file and its parts.

    Args:
        path: the file.
        command: the command that made it.
        redactor: hides keys, passwords, names, addresses and paths.
    """

    def __init__(self, path: Path, command: str, redactor: Redactor) -> None:
        self.path = path
        self.results: dict[str, PartResult] = {}
        self._command = command
        self._redact = redactor

    def run(self, parts: Mapping[str, Part], show: Show, report: Show) -> bool:
        """Run all parts, one after another; return whether all is well.

        Args:
            parts: the parts, by their names.
            show: takes what is being done.
            report: takes a line for each part that has ended.
        """
        self.results = {name: PartResult() for name in parts}
        self.write()
        for name, part in parts.items():
            show(name)
            self._run(part, self.results[name], show)
            result = self.results[name]
            error = f": {result.error.splitlines()[0]}" if result.error else ""
            report(f"{name}: {result.outcome}, {result.seconds:.0f} s{self._redact(error)}")
        return all(result.outcome == "ok" for result in self.results.values())

    def write(self) -> None:
        """Write the file: whole, or as it was."""
        text = self.text()
        written = self.path.with_name(f"{self.path.name}.part")
        written.write_text(text, encoding="utf-8")
        written.replace(self.path)

    def text(self) -> str:
        """Return the file: tables for readers, then everything as JSON."""
        results = self._redact({name: asdict(result) for name, result in self.results.items()})
        command = self._redact(self._command)
        lines = [
            "# lmcache-xpu report",
            "",
            f"`{command}` of lmcache-xpu {__version__}, on "
            f"{time.strftime('%Y-%m-%d')}. Keys, passwords, names of machines and users, "
            "addresses and paths were taken out before this was written.",
            "",
            "| part | result | seconds |",
            "|---|---|---|",
        ]
        for name, result in results.items():
            lines.append(f"| {name} | {_OUTCOMES[result['outcome']]} | {result['seconds']:.0f} |")
        for name, result in results.items():
            text = result["facts"].pop("text", "")  # readers have it here, programs need it not
            lines += ["", f"## {name[0].upper()}{name[1:]}", ""]
            lines += [line for block in (result["error"], text) if block for line in _fenced(block)]
            if not result["error"] and not text:
                lines += [f"{_OUTCOMES[result['outcome']]}."]
        document = {"lmcache_xpu": __version__, "command": command, "parts": results}
        block = json.dumps(document, indent=1, ensure_ascii=False)
        lines += ["", "## Everything, for programs", "", *_fenced(block, "json"), ""]
        return "\n".join(lines)

    def _run(self, part: Part, result: PartResult, show: Show) -> None:
        result.outcome = "running"
        begin = time.monotonic()

        def save(facts: dict[str, Any]) -> None:
            result.facts = facts
            result.seconds = time.monotonic() - begin
            self.write()

        try:
            well, result.facts = part(show, save)
            result.outcome = "ok" if well else "bad"
        except Exception as error:  # whatever it is, it is what there is to report
            result.outcome = "failed"
            result.error = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C: the parts before stay
            result.outcome = "interrupted"
            raise
        finally:
            save(result.facts)


def _fenced(text: str, kind: str = "text") -> list[str]:
    fence = "````" if "```" in text else "```"
    return [f"{fence}{kind}", text.rstrip(), fence]


def parts(*, quick: bool, timeout_s: float) -> dict[str, Part]:
    """Return all parts by name, the quickest first.

    Args:
        quick: fewer requests, each once, and the standard mode alone.
        timeout_s: seconds that an engine may take to start, and for each answer.
    """
    ours = ["ours"] if quick else ["ours", "ours-layerwise"]

    def exactness(show: Show, save: Save) -> tuple[bool, dict[str, Any]]:
        """Compare what a hit in the CPU tier restores with what computing wrote, byte by byte."""
        shape = _shape()

        def facts(results: list[runner.Result]) -> dict[str, Any]:
            lines = []
            for result in results:
                share = f"{result.exact or 0:.2%} of the blocks are the same, to the byte"
                lines.append(f"{result.title}: {result.error if result.exact is None else share}")
            engines = {r.variant: {"exact": r.exact, "error": r.error} for r in results}
            about = {"shape": shape.name, "tokens": shape.lengths[0]}
            return about | {"engines": engines, "text": "\n".join(lines)}

        results = runner.run(
            shape,
            variants_named(shape, ours),
            {},
            repeats=1,
            timeout_s=timeout_s,
            console=Console(quiet=True),
            save=lambda results: save(facts(results)),
            show=lambda text: show(f"exactness: {text}"),
        )
        return all(result.exact == 1 for result in results), facts(results)

    def bench(show: Show, save: Save) -> tuple[bool, dict[str, Any]]:
        """Time hits and stores beside an engine without a connector, as `bench engine` does."""
        shape = _shape()
        if quick:
            shape = replace(shape, lengths=shape.lengths[:1], turns=shape.turns[:1], crowd=2)

        def facts(results: list[runner.Result]) -> dict[str, Any]:
            figures, page = Figures(shape, results), io.StringIO()
            figures.show(Console(file=page, width=110))
            return figures.as_dict({}, "") | {"text": page.getvalue()}

        results = runner.run(
            shape,
            variants_named(shape, ["none", *ours]),
            row_jobs(shape),
            repeats=1 if quick else 3,
            timeout_s=timeout_s,
            console=Console(quiet=True),
            save=lambda results: save(facts(results)),
            show=lambda text: show(f"bench: {text}"),
        )
        well = all(not result.error and result.exact in (None, 1) for result in results)
        return well, facts(results)

    return {
        "machine": lambda *_: describe_machine(),
        "doctor": lambda *_: run_doctor(),
        "exactness": exactness,
        "bench": bench,
    }


def _shape() -> Shape:
    return shape_named("small" if built_for() == "cpu" else "1b")


def describe_machine() -> tuple[bool, dict[str, Any]]:
    """Return device, CPU and versions."""
    _, answer = _ask_python(MACHINE)
    text = "\n".join(f"{name}: {value}" for name, value in answer.items())
    return True, answer | {"text": text}


def run_doctor() -> tuple[bool, dict[str, Any]]:
    """Run `lmcache-xpu doctor`; its checks have a round trip on the device among them."""
    code, answer = _ask_python(DOCTOR)
    lines = [
        f"{check['outcome']:<5} {check['name']}: {check['found']}"
        + (f"\n      {check['advice']}" if check["advice"] else "")
        for check in answer["checks"]
    ]
    return code == 0, answer | {"text": "\n".join(lines)}


def _ask_python(program: str) -> tuple[int, dict[str, Any]]:
    """Run a program that ends with an object of JSON; return its exit code and the object.

    Raises:
        EngineError: it takes too long, or ends without an answer.
    """
    environ = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOCTOR_S,
            env=environ,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"no answer within {DOCTOR_S:.0f} s", "one", "The device or its driver hangs."
        ) from error
    answer = None
    # The last object that begins a line; libraries may print theirs before it.
    for match in re.finditer(r"^\{", done.stdout, re.MULTILINE):
        with suppress(ValueError):
            answer, _ = json.JSONDecoder().raw_decode(done.stdout, match.start())
    if answer is None:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise EngineError(f"exit code {done.returncode}: {last}", "an answer")
    return done.returncode, answer
