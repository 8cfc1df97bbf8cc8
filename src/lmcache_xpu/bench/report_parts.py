"""The parts of `lmcache-xpu report`; each runs in processes of its own.

A driver that hangs or takes its process along costs one part.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lmcache_xpu.bench import runner
from lmcache_xpu.bench.child import Child
from lmcache_xpu.bench.machine_report import Part, Save, Show
from lmcache_xpu.bench.report import Figures
from lmcache_xpu.bench.shapes import Shape, shape_named
from lmcache_xpu.bench.variants import variants_named
from lmcache_xpu.errors import EngineError
from lmcache_xpu.launch.serve import METRICS_VARIABLE, built_for

__all__ = ["parts"]

MACHINE = "import json; from lmcache_xpu.bench.runner import machine; print(json.dumps(machine()))"
DOCTOR = "from lmcache_xpu.cli import app; app(['doctor', '--json'])"
DOCTOR_S = 300.0


def parts(*, quick: bool, timeout_s: float) -> list[Part]:
    """Return all parts, the quickest first.

    Args:
        quick: fewer requests, each once, and the standard mode alone.
        timeout_s: seconds that an engine may take to start, and for each answer.
    """

    def exactness(show: Show, save: Save) -> tuple[bool, dict[str, Any]]:
        return check_exactness(show, save, quick=quick, timeout_s=timeout_s)

    def bench(show: Show, save: Save) -> tuple[bool, dict[str, Any]]:
        return measure(show, save, quick=quick, timeout_s=timeout_s)

    return [
        Part("machine", lambda *_: describe_machine()),
        Part("doctor", lambda *_: run_doctor()),
        Part("exactness", exactness),
        Part("bench", bench),
    ]


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


def check_exactness(
    show: Show, save: Save, *, quick: bool, timeout_s: float
) -> tuple[bool, dict[str, Any]]:
    """Compare what a hit in the CPU tier restores with what computing wrote, byte by byte."""
    shape, device = _shape(), built_for()
    names = ["ours"] if quick else ["ours", "ours-layerwise"]
    facts: dict[str, Any] = {"shape": shape.name, "tokens": shape.lengths[0], "engines": {}}
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        shape.write(Path(directory))
        for variant in variants_named(shape, names):
            show(f"exactness: {variant.title}")
            with Child(
                variant, shape, directory, device, graphs=False, timeout_s=timeout_s
            ) as child:
                answer = child.ask({"exact": shape.lengths[0]})
                exact, error = (answer or {}).get("exact"), child.error
            facts["engines"][variant.name] = {"exact": exact, "error": error}
            share = "" if exact is None else f"{exact:.2%} of the blocks are the same, to the byte"
            lines.append(f"{variant.title}: {share or error}")
            facts["text"] = "\n".join(lines)
            save(facts)
    return all(engine["exact"] == 1 for engine in facts["engines"].values()), facts


def measure(
    show: Show, save: Save, *, quick: bool, timeout_s: float
) -> tuple[bool, dict[str, Any]]:
    """Time hits and stores beside an engine without a connector, as `bench engine` does."""
    shape = _shape()
    if quick:
        shape = replace(shape, lengths=shape.lengths[:1], turns=shape.turns[:1], crowd=2)
    names = ["none", "ours"] if quick else ["none", "ours", "ours-layerwise"]

    def facts(results: list[runner.Result]) -> dict[str, Any]:
        figures = Figures(shape, results)
        page = Console(file=io.StringIO(), width=110)
        figures.show(page)
        text = page.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
        return figures.as_dict({}, "") | {"text": text}

    results = runner.run(
        shape,
        variants_named(shape, names),
        repeats=1 if quick else 3,
        rows=shape.rows(),
        in_turn=False,
        graphs=False,
        timeout_s=timeout_s,
        console=Console(quiet=True),
        save=lambda results: save(facts(results)),
        show=lambda text: show(f"bench: {text}"),
    )
    well = all(not result.error and result.exact in (None, 1) for result in results)
    return well, facts(results)


def _shape() -> Shape:
    return shape_named("small" if built_for() == "cpu" else "1b")


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
    answer = _last_object(done.stdout)
    if answer is None:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise EngineError(f"exit code {done.returncode}: {last}", "an answer")
    return done.returncode, answer


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the last object of JSON that begins a line; libraries may print theirs before it."""
    last = None
    for match in re.finditer(r"^\{", text, re.MULTILINE):
        with suppress(ValueError):
            last, _ = json.JSONDecoder().raw_decode(text, match.start())
    return last
