"""Engines, one after another or in turn, each in a process of its own."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lmcache_xpu import versions
from lmcache_xpu.bench.child import Child
from lmcache_xpu.bench.shapes import Row, Shape
from lmcache_xpu.bench.variants import Variant
from lmcache_xpu.launch.serve import built_for


@dataclass(slots=True)
class EngineResult:
    """How an engine's measurement went.

    Args:
        variant: its variant's name.
        title: its name for readers.
        error: the cause why it did not start, or did not end.
        seconds: time that its answers took.
    """

    variant: str
    title: str
    error: str | None = field(default=None, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)


@dataclass(slots=True)
class Result(EngineResult):
    """The figures of one engine.

    Args:
        exact: share of blocks that a hit restored to the byte; None without a tier.
        ms: row -> source -> milliseconds.
        tokens: row -> cached tokens.
        link_gb_s: speed of a raw copy by all devices together; from the engine without a
            connector.
    """

    exact: float | None = None
    ms: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    link_gb_s: dict[str, float] = field(default_factory=dict)


class Questions:
    """Asks engines, and shows what is asked.

    Args:
        console: where the progress is shown.
        show: called with what is being done.
    """

    def __init__(self, console: Console, show: Callable[[str], None] = lambda _: None) -> None:
        self._console = console
        self._show = show

    def ask(
        self, result: EngineResult, child: Child, name: str, job: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an engine's answer; an empty one, and an error in its result, if it failed.

        Args:
            result: the engine's.
            child: its process.
            name: of the job, for readers.
            job: see `jobs.answer`.
        """
        if result.error is not None:
            return {}
        self._show(f"{result.title}: {name}")
        begin = time.monotonic()
        with self._console.status(f"{result.title}: {name}"):
            answer = child.ask(job)
        result.seconds += time.monotonic() - begin
        if answer is None:
            result.error = child.error
            self._console.print(f"{result.title}: {child.error}", markup=False, highlight=False)
        return answer or {}

    def end(self, result: EngineResult) -> None:
        """Say how long an engine took that did not fail."""
        if result.error is None:
            self._console.print(f"{result.title}: {result.seconds:.0f} s", highlight=False)


def started(
    shape: Shape, engines: list[Variant], *, in_turn: bool, graphs: bool, timeout_s: float
) -> Iterator[list[Child]]:
    """Start engines: yield those that run at once, and end them when the next ones are asked for.

    Args:
        shape: the model's shape.
        engines: the engines' variants.
        in_turn: whether all engines are there at once, so that they meet the same host. They share
            the devices out, see `device_masks`. Else there is one engine after another.
        graphs: whether vLLM compiles graphs.
        timeout_s: seconds that an engine may take to start, and for each answer.
    """
    device = built_for()
    masks = device_masks(device, shape.devices) if in_turn else [{}]
    with tempfile.TemporaryDirectory() as directory:
        shape.write(Path(directory))
        for group in [engines] if in_turn else [[variant] for variant in engines]:
            with ExitStack() as stack:
                yield [
                    stack.enter_context(
                        Child(
                            variant,
                            shape,
                            directory,
                            device,
                            graphs=graphs,
                            timeout_s=timeout_s,
                            mask=masks[number % len(masks)],
                        )
                    )
                    for number, variant in enumerate(group)
                ]


def device_masks(device: str, count: int) -> list[dict[str, str]]:
    """Return, for each `count` devices, the variable that lets an engine see these alone.

    On CPU, and where there are fewer devices, the only one sets nothing.

    Args:
        device: `cpu`, `cuda` or `xpu`.
        count: devices of an engine.
    """
    if device == "cpu":
        return [{}]
    import torch
    from vllm.platforms import current_platform

    variable = current_platform.device_control_env_var
    chosen = os.environ.get(variable)
    names = chosen.split(",") if chosen else [*map(str, range(torch.accelerator.device_count()))]
    firsts = range(0, len(names) - count + 1, count)  # what is left over is no engine's
    return [{variable: ",".join(names[first : first + count])} for first in firsts] or [{}]


def run(
    shape: Shape,
    engines: list[Variant],
    *,
    repeats: int,
    rows: Sequence[Row],
    in_turn: bool,
    graphs: bool,
    timeout_s: float,
    console: Console,
    save: Callable[[list[Result]], None] = lambda _: None,
    show: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Measure engines; one that fails is a result with an error.

    Args:
        shape: the model's shape.
        engines: the engines' variants.
        repeats: repeats of each row; medians count.
        rows: of the shape.
        in_turn: see `started`; each row then goes to one engine after another.
        graphs: whether vLLM compiles graphs.
        timeout_s: seconds that an engine may take to start, and for each answer.
        console: where the progress is shown.
        save: called with all results so far after each row.
        show: called with what is being done.
    """
    results: list[Result] = []
    groups = started(shape, engines, in_turn=in_turn, graphs=graphs, timeout_s=timeout_s)
    for children in groups:
        pairs = [(Result(child.variant.name, child.variant.title), child) for child in children]
        results += [result for result, _ in pairs]
        _measure(pairs, shape, rows, repeats, Questions(console, show), partial(save, results))
    return results


def device_memory_bytes() -> int:
    """Return the size of the first device's memory; 0 without an accelerator."""
    import torch

    if not torch.accelerator.is_available():
        return 0
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return int(module.get_device_properties(0).total_memory)


def machine() -> dict[str, str]:
    """Return the facts that figures go with: device, CPU, versions, date."""
    import torch

    installed = versions.installed()
    device = "cpu"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        device = f"{kind}: {module.get_device_name()}"
        properties = module.get_device_properties()
        driver = getattr(properties, "driver_version", None) or getattr(torch.version, "cuda", "")
        device += f", driver or runtime {driver}" if driver else ""
    return {
        "device": device,
        "cpu": f"{_cpu_name()}, {os.cpu_count()} threads",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": installed.torch or "",
        "vllm": installed.vllm or "",
        "lmcache": installed.lmcache or "",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _measure(
    children: list[tuple[Result, Child]],
    shape: Shape,
    rows: Sequence[Row],
    repeats: int,
    questions: Questions,
    save: Callable[[], None],
) -> None:
    """Let each child do all jobs, and fill in its result; a run may be ended after any row."""
    first = shape.lengths[0]
    ask = questions.ask
    for result, child in children:
        ask(result, child, "start", {"warm up": first // 2})
        if result.variant == "none":
            copies = {"repeats": repeats, "devices": shape.devices}
            answer = ask(result, child, "raw copy", {"link": copies})
            result.link_gb_s = answer.get("link", {})
        else:
            result.exact = ask(result, child, "exactness", {"exact": first}).get("exact")
    for row in rows:
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(repeats):
            for result, child in children:
                answer = ask(result, child, row.name, row.job)
                rounds.setdefault(result.variant, []).extend(answer.get("rounds", []))
        for result, _ in children:
            if result.error is None:
                result.ms[row.name] = medians(rounds[result.variant])
                result.tokens[row.name] = row.tokens
        save()
    for result, _ in children:
        questions.end(result)


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each source, milliseconds."""
    return {
        name: statistics.median(seconds[name] for seconds in rounds) * 1e3 for name in rounds[0]
    }
