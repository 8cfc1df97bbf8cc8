"""The jobs of `bench engine`, which an engine's process does; see `engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_xpu.bench.shapes import Shape, Turn, chosen

if TYPE_CHECKING:
    from lmcache_xpu.bench.engine import Engine

Job = Callable[["Engine"], Any]  # sent to the engine's process, and its answer back: both pickled

STORE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history


def row_jobs(shape: Shape, names: Collection[str] = ()) -> dict[str, Job]:
    """Return the jobs of these rows, or of all, by name; each answers with a list of seconds.

    Raises:
        SettingsError: there is no row of a name.
    """
    return {
        name: partial(whole_prompt, length=row)
        if isinstance(row, int)
        else partial(later_turns, turns=row)
        for name, row in chosen("row", shape.rows, names).items()
    }


def warm_up(engine: Engine, length: int) -> None:
    """Compute a prompt: kernels are compiled at first use."""
    engine.seconds(engine.prompt(length))


def exactness(engine: Engine, length: int) -> float:
    """Return the share of blocks, in all layers, that a hit in the tier restores to the byte."""
    prompt = engine.prompt(length)
    engine.forget()
    engine.zero()
    cold = engine.written(prompt)
    time.sleep(STORE_S)
    engine.forget()
    engine.zero()
    warm = engine.written(prompt)
    return float((cold == warm).float().mean())


def link_gb_s(_engine: Engine, repeats: int, devices: int) -> dict[str, float]:
    """Time one large copy from pinned memory (on CPU: a plain copy) and back; GB/s.

    So many devices copy at the same time; the rate is that of all together, a median.
    """
    import torch

    from lmcache_xpu.bench.engine import synchronize

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    size = 2**30 if device else 2**28
    names = [f"{device.type}:{number}" for number in range(devices)] if device else ["cpu"]
    hosts = [
        torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).fill_(1) for _ in names
    ]
    on_devices = [torch.ones(size, dtype=torch.uint8, device=name) for name in names]
    rates = {}
    for name, targets, sources in (("load", on_devices, hosts), ("store", hosts, on_devices)):
        times = []
        for _ in range(repeats + 2):
            synchronize(devices)
            begin = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            synchronize(devices)
            times.append(time.perf_counter() - begin)
        rates[name] = len(names) * size / sorted(times)[len(times) // 2] / 1e9
    return rates


def whole_prompt(engine: Engine, length: int) -> list[dict[str, float]]:
    """Time a whole prompt: recomputed, in the engine's own cache, in the tier."""
    prompt = engine.prompt(length)
    seconds = {"recompute": engine.seconds(prompt)}
    time.sleep(STORE_S / 2)
    seconds["own prefix"] = engine.seconds(prompt)
    if engine.hits == "tier":
        engine.forget()
        seconds["tier"] = engine.seconds(prompt)
    return [{**seconds, "python": _python_s()}]


def later_turns(engine: Engine, turns: Sequence[Turn]) -> list[dict[str, float]]:
    """Time later turns at once, several times: histories in the engine's own cache, in the tier."""
    histories = [engine.prompt(turn.history) for turn in turns]
    pairs = list(zip(histories, turns, strict=True))
    for history in histories:
        engine.seconds(history)

    def ask() -> float:
        return engine.seconds(*(history + engine.prompt(turn.new) for history, turn in pairs))

    rounds = []
    for _ in range(TURN_REPEATS):
        time.sleep(STORE_S / 2)
        seconds = {"own prefix": ask()}
        if engine.hits == "tier":
            time.sleep(STORE_S / 2)
            engine.forget()
            seconds["tier"] = ask()
        rounds.append({**seconds, "python": _python_s()})
    return rounds


def _python_s() -> float:
    """Time a fixed piece of Python, which shows how fast the host is."""
    begin = time.perf_counter()
    for _ in range(100_000):
        pass
    return time.perf_counter() - begin
