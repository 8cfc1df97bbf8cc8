"""`lmcache-xpu report`: one file that says what runs on a machine, to send to this project.

The file is there from the start and is written anew after each part. A part that fails is an entry
of the file like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmcache_xpu import __version__
from lmcache_xpu.bench.redaction import Redactor

__all__ = ["MachineReport", "Part", "PartResult"]

Show = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
Outcome = Literal["not run", "running", "ok", "bad", "failed", "interrupted"]

_OUTCOMES: dict[Outcome, str] = {
    "not run": "not run",
    "running": "was running when this was written",
    "ok": "ok",
    "bad": "**bad news**: see below",
    "failed": "**failed**: see below",
    "interrupted": "interrupted",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a report.

    Args:
        name: for readers and programs.
        run: does it; takes a function that shows what it does, and one that saves facts so far.
            Returns whether all is well, and the facts. A fact called `text` is shown to readers.
    """

    name: str
    run: Callable[[Show, Save], tuple[bool, dict[str, Any]]]


@dataclass(slots=True)
class PartResult:
    """What became of a part.

    Args:
        outcome: of the part; bad: it ran and has bad news; failed: it did not run to its end.
        seconds: that it took.
        facts: what was found, as JSON has it.
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
        redactor: takes out what tells whose machine it is.
    """

    def __init__(self, path: Path, command: str, redactor: Redactor) -> None:
        self.path = path
        self.results: dict[str, PartResult] = {}
        self._command = command
        self._redact = redactor

    def run(self, parts: Iterable[Part], show: Show, tell: Show) -> bool:
        """Run all parts, one after another; return whether all is well.

        Args:
            parts: the parts.
            show: takes what is being done.
            tell: takes a line for each part that has ended.
        """
        parts = list(parts)
        self.results = {part.name: PartResult() for part in parts}
        self.write()
        for part in parts:
            show(part.name)
            self._run(part, show)
            result = self.results[part.name]
            error = f": {result.error.splitlines()[0]}" if result.error else ""
            tell(f"{part.name}: {result.outcome}, {result.seconds:.0f} s{self._redact(error)}")
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
        for name, result in results.items():
            lines.append(f"| {name} | {_OUTCOMES[result['outcome']]} | {result['seconds']:.0f} |")
        for name, result in results.items():
            lines += _section(name, result)
        document = {"lmcache_xpu": __version__, "command": self._redact(self._command)}
        for result in results.values():
            result["facts"].pop("text", None)  # readers have it above
        block = json.dumps(document | {"parts": results}, indent=1, ensure_ascii=False)
        lines += ["", "## Everything, for programs", "", *_fenced(block, "json"), ""]
        return "\n".join(lines)

    def _run(self, part: Part, show: Show) -> None:
        result = self.results[part.name] = PartResult("running")
        begin = time.monotonic()

        def save(facts: dict[str, Any]) -> None:
            result.facts = facts
            result.seconds = time.monotonic() - begin
            self.write()

        try:
            well, result.facts = part.run(show, save)
            result.outcome = "ok" if well else "bad"
        except Exception as error:  # whatever it is, it is what there is to report
            result.outcome = "failed"
            result.error = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C: the parts before stay
            result.outcome = "interrupted"
            raise
        finally:
            result.seconds = time.monotonic() - begin
            self.write()


def _section(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return what readers see of a part."""
    lines = ["", f"## {name[0].upper()}{name[1:]}", ""]
    if result["error"]:
        lines += _fenced(result["error"])
    if text := result["facts"].get("text"):
        lines += _fenced(text)
    elif not result["error"]:
        lines += [f"{_OUTCOMES[result['outcome']]}."]
    return lines


def _fenced(text: str, kind: str = "text") -> list[str]:
    fence = "````" if "```" in text else "```"
    return [f"{fence}{kind}", text.rstrip(), fence]
