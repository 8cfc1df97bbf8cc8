"""Engines, asked one after another or by turns, each in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from lmcache_xpu import versions
from lmcache_xpu.bench.jobs import Figures, Job, exactness, link_gb_s, warm_up
from lmcache_xpu.bench.shapes import Shape
from lmcache_xpu.bench.variants import Variant
from lmcache_xpu.harness.random_model import llama_config
from lmcache_xpu.launch.serve import built_for

# vLLM keeps one core from its CPU worker, and with a KV connector another one: engines with and
# without would compute on different numbers of cores.
COMMON = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
PROGRAM = "from lmcache_xpu.bench.engine import main; main()"
END_S = 30.0


@dataclass(slots=True)
class Result:
    """The figures of one engine."""

    variant: str  # its variant's name
    title: str  # its name for readers
    error: str | None = None  # why it did not start, or gave no more answers
    seconds: float = 0.0  # time that its answers took
    # Share of blocks that a hit restored to the byte; None where nothing was compared.
    exact: float | None = None
    # Speed of a raw copy by all devices together; of the engine without a connector.
    link_gb_s: dict[str, float] = field(default_factory=dict)
    # Row or load -> what was measured each time.
    rounds: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, Figures]:
        """Medians of the rounds, by row or load."""
        return {
            name: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
            for name, rounds in self.rounds.items()
        }


class Child:
    """A process with an engine; a context manager.

    It starts at once. Its first answer, with the start, and each later one may take `timeout_s`
    seconds. `variables` join this process's in its environment.
    """

    def __init__(
        self,
        variant: Variant,
        values: Mapping[str, Any],
        variables: Mapping[str, str],
        *,
        timeout_s: float,
        console: Console,
    ) -> None:
        self.variant = variant
        self.result = Result(variant.name, variant.title)
        self._timeout_s, self._console = timeout_s, console
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see __exit__
        self._connection, theirs = Pipe()
        words = [json.dumps(values), variant.hits, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words],
                env={**os.environ, **COMMON, **variables},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, name: str, job: Job) -> Any:
        """Return a job's answer; None, and the result has an error, if the engine failed."""
        if self.result.error is not None:
            return None
        begin = time.monotonic()
        with self._console.status(f"{self.result.title}: {name}"):
            with suppress(BrokenPipeError):  # it has ended; `_answer` says why
                self._connection.send(job)
            answer = self._answer()
        self.result.seconds += time.monotonic() - begin
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self.result.error is not None:
            self._process.kill()
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> Any:
        try:
            if self._connection.poll(self._timeout_s):
                return self._connection.recv()
            self.result.error = f"no answer within {self._timeout_s:.0f} s"
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            self._log.seek(0)
            self.result.error = _cause(self._log.read().splitlines()[-60:], code)
        return None


def _cause(lines: list[str], code: int) -> str:
    errors = [line for line in lines if "Error" in line and "raise " not in line]
    return (errors[-1].strip() if errors else f"exit code {code}")[:300]


def run(
    shape: Shape,
    engines: list[Variant],
    jobs: Mapping[str, Job],
    *,
    repeats: int,
    in_turn: bool = False,
    graphs: bool = False,
    timeout_s: float,
    console: Console,
    save: Callable[[list[Result]], None],
) -> list[Result]:
    """Measure engines, each job so many times; one that fails is a result with an error.

    Except under load, the bytes of a hit are compared first, and a raw copy is timed. With
    `in_turn` all engines are there at once and each job goes to one after another, so that they
    meet the same host; they share the devices out, see `device_masks`. An engine has `timeout_s`
    seconds to start, and for each answer. `save` gets all results so far after each job's repeats.
    """
    device = built_for()
    masks = device_masks(device, shape.devices) if in_turn else [{}]
    length = shape.prompts[0].history
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as model:
        # The configuration alone: weights are made up when it is loaded.
        (Path(model) / "config.json").write_text(json.dumps(llama_config(shape.model)))
        for group in [engines] if in_turn else [[variant] for variant in engines]:
            with ExitStack() as stack:
                children = []
                for variant, mask in zip(group, itertools.cycle(masks), strict=False):
                    values = variant.values(shape, model, device, graphs=graphs)
                    variables = {**mask, **variant.variables(shape, device)}
                    child = Child(variant, values, variables, timeout_s=timeout_s, console=console)
                    children.append(stack.enter_context(child))
                results += [child.result for child in children]
                for child in children:
                    child.ask("start", partial(warm_up, length=length))
                    if shape.loaded:
                        continue
                    if child.variant.hits == "none":
                        copies = partial(link_gb_s, repeats=repeats, devices=shape.devices)
                        child.result.link_gb_s = child.ask("raw copy", copies) or {}
                    else:
                        check = partial(exactness, length=length)
                        child.result.exact = child.ask("exactness", check)
                save(results)
                for name, job in jobs.items():
                    for _, child in itertools.product(range(repeats), children):
                        if rounds := child.ask(name, job):
                            child.result.rounds.setdefault(name, []).extend(rounds)
                    save(results)
    return results


def device_masks(device: str, count: int) -> list[dict[str, str]]:
    """Return, for each `count` devices, the variable that lets an engine see these alone.

    On CPU, and where there are fewer devices, the only one sets nothing.
    """
    if device == "cpu":
        return [{}]
    import torch
    from vllm.platforms import current_platform

    variable = current_platform.device_control_env_var
    users = os.environ.get(variable)
    names = users.split(",") if users else [*map(str, range(torch.accelerator.device_count()))]
    firsts = range(0, len(names) - count + 1, count)  # what is left over is no engine's
    return [{variable: ",".join(names[first : first + count])} for first in firsts] or [{}]


def machine() -> dict[str, str]:
    """Return the facts that figures go with: device, CPU, versions, date."""
    import torch

    device = "cpu"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        properties = module.get_device_properties()
        driver = getattr(properties, "driver_version", None) or getattr(torch.version, "cuda", "")
        device = f"{kind}: {module.get_device_name()}, driver or runtime {driver}"
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    installed = versions.installed()
    return {
        "device": device,
        "cpu": f"{cpu[1] if cpu else 'unknown'}, {os.cpu_count()} threads",
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: getattr(installed, name) or "" for name in ("torch", "vllm", "lmcache")},
        "date": time.strftime("%Y-%m-%d"),
    }
