"""`lmcache-xpu report`: one file that says what runs on a machine, to send to this project.

The file is written anew after each part, of which each runs in processes of its own: a driver that
hangs or takes its process along costs one part. A part that fails is an entry like any other.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from lmcache_xpu import __version__
from lmcache_xpu.bench import runner
from lmcache_xpu.bench.redaction import Redactor
from lmcache_xpu.bench.report import EngineFigures
from lmcache_xpu.bench.shapes import shape_named
from lmcache_xpu.bench.variants import variants_named
from lmcache_xpu.errors import EngineError
from lmcache_xpu.launch.serve import METRICS_VARIABLE, built_for

Facts = dict[str, Any]  # as JSON has them; what is called `text` is shown to readers
# Does a part; takes the console that shows its progress, and a function that saves facts so far.
# Returns whether all is well, and the facts.
Part = Callable[[Console, Callable[[Facts], None]], tuple[bool, Facts]]

MACHINE = (
    "import json; from lmcache_xpu.bench.runner import machine; "
    "print(json.dumps(machine(), indent=1))"
)
DOCTOR = "from lmcache_xpu.cli import app; app(['doctor', '--json'])"
DOCTOR_S = 300.0

_OUTCOMES = {  # for readers
    "running": "was running when this was written",
    "bad": "**bad news**: see below",
    "failed": "**failed**: see below",
}


@dataclass(slots=True)
class PartResult:
    """What became of a part.

    Args:
        outcome: not run, running, ok, bad (it has bad news), failed (it did not run to its end) or
            interrupted.
        seconds: that it took.
        facts: what it measured, as JSON has it.
        error: why it failed.
    """

    outcome: str = "not run"
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)
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

    def run(self, parts: Mapping[str, Part], console: Console) -> bool:
        """Run all parts, one after another; return whether all is well.

        Args:
            parts: the parts, by their names.
            console: shows a line for each part that has ended.
        """
        self.results = {name: PartResult() for name in parts}
        self.write()
        for name, part in parts.items():
            result = self.results[name]
            self._run(part, result, console)
            error = f": {result.error.splitlines()[0]}" if result.error else ""
            console.print(f"{name}: {result.outcome}, {result.seconds:.0f} s{self._redact(error)}")
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
        outcomes = {name: _OUTCOMES.get(r["outcome"], r["outcome"]) for name, r in results.items()}
        for name, result in results.items():
            lines.append(f"| {name} | {outcomes[name]} | {result['seconds']:.0f} |")
        for name, result in results.items():
            text = result["facts"].pop("text", "")  # readers have it here, programs need it not
            lines += ["", f"## {name.capitalize()}", ""]
            lines += [line for block in (result["error"], text) if block for line in _fenced(block)]
            if not result["error"] and not text:
                lines += [f"{outcomes[name]}."]
        document = {"lmcache_xpu": __version__, "command": command, "parts": results}
        block = json.dumps(document, indent=1, ensure_ascii=False)
        lines += ["", "## Everything, for programs", "", *_fenced(block, "json"), ""]
        return "\n".join(lines)

    def _run(self, part: Part, result: PartResult, console: Console) -> None:
        begin = time.monotonic()

        def save(facts: Facts) -> None:
            result.facts, result.seconds = facts, time.monotonic() - begin
            self.write()

        result.outcome = "running"
        self.write()
        try:
            well, result.facts = part(console, save)
            result.outcome = "ok" if well else "bad"
        except Exception as error:
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

    def bench(console: Console, save: Callable[[Facts], None]) -> tuple[bool, Facts]:
        """Compare what hits restore, and time them beside an engine without a connector."""
        shape = shape_named("small" if built_for() == "cpu" else "1b")
        rows = [*shape.rows]

        def facts(results: list[runner.Result]) -> Facts:
            figures, page = EngineFigures(shape, results), io.StringIO()
            figures.show(Console(file=page, width=110))
            return figures.as_dict() | {"text": page.getvalue()}

        results = runner.run(
            shape,
            variants_named(shape, ["none", "ours"] + ["ours-layerwise"] * (not quick)),
            {row: shape.rows[row].measure for row in ([rows[0], rows[-1]] if quick else rows)},
            repeats=1 if quick else 3,
            timeout_s=timeout_s,
            console=console,
            save=lambda results: save(facts(results)),
        )
        well = all(not result.error and result.exact in (None, 1) for result in results)
        return well, facts(results)

    return {"machine": describe_machine, "doctor": run_doctor, "bench": bench}


def describe_machine(console: Console, _save: object) -> tuple[bool, Facts]:
    """Return device, CPU and versions."""
    _, answer = _ask_python(MACHINE, console)
    text = "\n".join(f"{name}: {value}" for name, value in answer.items())
    return True, answer | {"text": text}


def run_doctor(console: Console, _save: object) -> tuple[bool, Facts]:
    """Run `lmcache-xpu doctor`; its checks have a round trip on the device among them."""
    code, answer = _ask_python(DOCTOR, console)
    lines = [
        f"{check['outcome']:<5} {check['name']}: {check['found']}"
        + (f"\n      {check['advice']}" if check["advice"] else "")
        for check in answer["checks"]
    ]
    return code == 0, answer | {"text": "\n".join(lines)}


def _ask_python(program: str, console: Console) -> tuple[int, Facts]:
    """Run a program that prints an indented object of JSON; return its exit code and the object.

    Raises:
        EngineError: it takes too long, or ends without an answer.
    """
    environ = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
    try:
        with console.status("Checking this machine"):
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DOCTOR_S,
                env=environ,
            )
        # Libraries may print before it and after it.
        rest = f"\n{done.stdout}".rpartition("\n{\n")[2]
        return done.returncode, json.JSONDecoder().raw_decode(f"{{\n{rest}")[0]
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"no answer within {DOCTOR_S:.0f} s", "one", "The device or its driver hangs."
        ) from error
    except ValueError as error:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise EngineError(f"exit code {done.returncode}: {last}", "an answer") from error
