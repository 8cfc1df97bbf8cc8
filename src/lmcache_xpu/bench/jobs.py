"""The jobs of `bench engine`, which an engine's process does; see `engine`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_xpu.bench.engine import Engine

Job = Callable[["Engine"], Any]  # sent to the engine's process, and its answer back: both pickled
Figures = dict[str, float]  # of one round, by the words over a table's column

STORE_S = 1.0  # stores go on after an answer
TURN_REPEATS = 3  # later turns of one history


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are asked at once: tokens that are cached, then tokens that are not."""

    history: int  # cached tokens of each
    new: int = 0  # other tokens of each; 0 for whole prompts, 1 or more for later turns
    count: int = 1  # number of prompts

    def __str__(self) -> str:
        each = f"{self.history} + {self.new}" if self.new else f"{self.history}"
        return each if self.count == 1 else f"{self.count} x ({each})"

    @property
    def title(self) -> str:
        """The words over a table."""
        return f"Prompts of {self} tokens, ms"

    def measure(self, engine: Engine) -> list[Figures]:
        """Time them, later turns several times.

        Returns:
            milliseconds to the first token of all, with histories in the engine's own cache (`own
            prefix`) and in the `tier`, if any; of whole prompts also when they are new
            (`recompute`).
        """
        histories = [engine.prompt(self.history) for _ in range(self.count)]
        recompute_ms = engine.seconds(*histories) * 1e3
        rounds = []
        for _ in range(TURN_REPEATS if self.new else 1):
            ms = {} if self.new else {"recompute": recompute_ms}
            for place in ("own prefix", "tier") if engine.hits == "tier" else ("own prefix",):
                time.sleep(STORE_S / 2)
                if place == "tier":
                    engine.forget()
                asked = [history + engine.prompt(self.new) for history in histories]
                ms[place] = engine.seconds(*asked) * 1e3
            rounds.append(ms)
        return rounds


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
