"""All engines one after another, each in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lmcache_xpu import versions
from lmcache_xpu.bench.measure import MARK
from lmcache_xpu.bench.shapes import Shape
from lmcache_xpu.bench.variants import Variant
from lmcache_xpu.serve import built_for

# vLLM keeps one core from its CPU worker, and with a KV connector another one: engines with and
# without would compute on different numbers of cores.
COMMON = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


@dataclass(slots=True)
class Result:
    """What one engine did.

    Args:
        variant: its name.
        title: for readers.
        exact: share of blocks that a hit restored to the byte; None without a tier.
        ms: row -> source -> milliseconds.
        tokens: row -> cached tokens.
        link_gb_s: of a raw copy; from the engine without a connector.
        error: why it did not start, or did not end.
        seconds: that it took in all.
    """

    variant: str
    title: str
    exact: float | None = None
    ms: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    link_gb_s: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


def run(
    shape: Shape,
    chosen: list[Variant],
    *,
    repeats: int,
    graphs: bool,
    timeout_s: float,
    console: Console,
) -> list[Result]:
    """Measure engines; one that fails is a result with an error."""
    device = built_for()
    with tempfile.TemporaryDirectory() as directory:
        shape.write(Path(directory))
        return [
            _measure(variant, shape, directory, device, repeats, graphs, timeout_s, console)
            for variant in chosen
        ]


def machine() -> dict[str, str]:
    """What the figures belong to."""
    import torch

    found = versions.installed()
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
        "torch": found.torch or "",
        "vllm": found.vllm or "",
        "lmcache": found.lmcache or "",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _measure(
    variant: Variant,
    shape: Shape,
    model: str,
    device: str,
    repeats: int,
    graphs: bool,
    timeout_s: float,
    console: Console,
) -> Result:
    job = {
        "values": variant.values(shape, model, device, graphs=graphs),
        "shape": shape.name,
        "repeats": repeats,
        "tier": variant.name != "none",
    }
    result = Result(variant.name, variant.title)
    begin = time.monotonic()
    environment = {**os.environ, **COMMON, **variant.variables(shape, device)}
    command = [sys.executable, "-m", "lmcache_xpu.bench.measure", json.dumps(job)]
    last: deque[str] = deque(maxlen=60)
    with (
        console.status(f"{variant.title}: starting") as status,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(MARK):
                done = _take(result, json.loads(line.removeprefix(MARK)))
                status.update(f"{variant.title}: {done}")
            else:
                last.append(line.rstrip())
        child.wait()
        timer.cancel()
    result.seconds = time.monotonic() - begin
    if child.returncode:
        result.error = _cause(list(last), result.seconds >= timeout_s, child.returncode, timeout_s)
    end = result.error or f"{result.seconds:.0f} s"
    console.print(f"{variant.title}: {end}", markup=False, highlight=False)
    return result


def _take(result: Result, facts: dict[str, object]) -> str:
    """Put a line of the child into the result; what it says for the progress."""
    match facts:
        case {"exact": float() as share}:
            result.exact = share
            return f"exact {share:.4f}"
        case {"link": dict() as rates}:
            result.link_gb_s = rates
            return "raw copies timed"
        case {"row": str() as row, "ms": dict() as times, "tokens": int() as tokens}:
            result.ms[row] = times
            result.tokens[row] = tokens
            return f"{row} timed"
    return "started"


def _cause(lines: list[str], ended: bool, code: int, timeout_s: float) -> str:
    if ended:
        return f"not done within {timeout_s:.0f} s"
    errors = [line for line in lines if "Error" in line and "raise " not in line]
    return (errors[-1].strip() if errors else f"exit code {code}")[:300]
