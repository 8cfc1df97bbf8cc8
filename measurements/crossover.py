"""From which length on is a hit faster than computing, from memory and from disks of some speeds?

    python measurements/crossover.py --json FILE --plot FILE [--shape 8b]

One engine in this process is asked for prompts of several lengths: new ones, and ones whose KV
cache is in a tier. A hit is loaded in any case ("always"), and then as the policy chooses ("auto").
Disks of a given speed are the real one, whose reads are held up.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lmcache_xpu.bench.engine import Engine
from lmcache_xpu.bench.runner import machine
from lmcache_xpu.bench.shapes import shape_named
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.serve import built_for
from lmcache_xpu.launch.settings import Settings

NEW = 32  # tokens of a prompt that no tier has
SETTLE_S = 0.7  # stores go on after an answer


class SlowDisk:
    """Holds up reads of the disk tier, so that all together run at a speed."""

    def __init__(self) -> None:
        from lmcache_xpu.tiers.disk.l2_adapter import DiskL2Adapter

        self.bytes_per_s: float | None = None
        self._lock = threading.Lock()
        read = DiskL2Adapter._read

        def slow(adapter: Any, key: Any, obj: Any) -> bool:
            if self.bytes_per_s is not None:
                with self._lock:
                    time.sleep(obj.get_size() / self.bytes_per_s)
            return read(adapter, key, obj)

        DiskL2Adapter._read = slow


class Tiers:
    """The engine's tiers and the policy of its loads."""

    def __init__(self, engine: Engine) -> None:
        from lmcache_xpu.cache.local_cache import LocalCache

        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        self._policy = scheduler.connector.scheduler_half.policy
        [cache] = LocalCache._of_engines.values()
        self._storage = cache._storage

    def empty_memory(self) -> None:
        """Leave what is stored on the disk alone."""
        time.sleep(SETTLE_S)
        self._storage.clear()

    def choose(self, loads: str) -> None:
        """Use a way to load; see the setting `loads`."""
        self._policy.loads = loads

    def forget_speeds(self) -> None:
        """Let the policy measure loads anew."""
        self._policy._loaded_per_s = None


def measure(
    engine: Engine, tiers: Tiers, length: int, repeats: int, *, disk: bool
) -> dict[str, float]:
    """Return milliseconds to first token, medians: computed, and hits loaded or as chosen."""
    times: dict[str, list[float]] = {"computed": [], "always": [], "auto": []}
    for _ in range(repeats):
        prompt = engine.prompt(length)
        times["computed"].append(engine.seconds(prompt + engine.prompt(NEW)))
        for loads in ("always", "auto"):
            if disk:
                tiers.empty_memory()
            else:
                time.sleep(SETTLE_S)
            engine.forget()
            tiers.choose(loads)
            times[loads].append(engine.seconds(prompt + engine.prompt(NEW)))
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the times over the length, a picture for each place of the KV cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(figures["places"]), 3.6), layout="constrained")
    for axes, (place, rows) in zip(
        figure.subplots(1, len(figures["places"]), squeeze=False)[0],
        figures["places"].items(),
        strict=True,
    ):
        lengths = [int(length) for length in rows]
        for name, label, style in (
            ("computed", "computed", "k--"),
            ("always", "loaded", "o-"),
            ("auto", "as chosen (auto)", "s:"),
        ):
            axes.plot(lengths, [row[name] for row in rows.values()], style, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("tokens of the prompt in the tier")
        axes.set_title(place)
    figure.axes[0].set_ylabel("time to first token, ms")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(
    json_file: Annotated[Path, typer.Option("--json")],
    plot_file: Annotated[Path | None, typer.Option("--plot")] = None,
    shape: str = "small",
    lengths: str = "256,512,1024,2048,4096",
    mib_s: Annotated[str, typer.Option(help="Speeds of disks, MiB/s.")] = "100,10",
    repeats: int = 5,
) -> None:
    """Measure, print and write the figures."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        HF_HUB_OFFLINE="1",
        LMCACHE_XPU_DEVICES=(device := built_for()),
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    )
    model, console = shape_named(shape), Console()
    with tempfile.TemporaryDirectory() as directory:
        model.write(Path(directory))
        settings = Settings.load(
            {
                "model": directory,
                "device": device,
                "dtype": model.model.dtype,
                "log_level": "warning",
                "enforce_eager": True,
                "loads": "always",
                "disk_path": Path(directory) / "disk",
                "disk_gib": 40,
                "extra_args": ["--load-format", "dummy", "--skip-tokenizer-init"],
                **model.settings,
            }
        )
        os.environ.update(engine_variables(settings))
        engine, slow = Engine(settings), SlowDisk()
        tiers = Tiers(engine)
        for _ in range(8):  # what is compiled at first use, and the policy's measure of computing
            engine.seconds(engine.prompt(2048), engine.prompt(600))
            for _ in range(2):  # what the first one takes may be the large step's before it
                engine.seconds(engine.prompt(64))
        figures: dict[str, Any] = {"machine": machine(), "shape": shape, "places": {}}
        speeds = [float(speed) for speed in mib_s.split(",") if speed]
        places: list[tuple[str, bool, float | None]] = [
            ("memory", False, None),
            ("disk", True, None),
            *((f"disk, {speed:g} MiB/s", True, speed * 2**20) for speed in speeds),
        ]
        for place, disk, slow.bytes_per_s in places:
            tiers.forget_speeds()
            rows = figures["places"][place] = {}
            for length in map(int, reversed(lengths.split(","))):
                tiers.choose("always")
                rows[str(length)] = measure(engine, tiers, length, repeats, disk=disk)
                console.print(place, length, rows[str(length)])
            figures["places"][place] = dict(reversed(rows.items()))
            json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot_file is not None:
        plot(figures, plot_file)
    console.file.flush()
    os._exit(0)  # LMCache's threads would keep the process


if __name__ == "__main__":
    typer.run(main)
