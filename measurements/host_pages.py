"""What huge pages and locked pages change for copies out of a CPU tier, on this machine.

    python measurements/host_pages.py

A pool of host memory is taken in four ways, and pieces of it are copied in random order, as a load
copies chunks. The four ways take turns in each round. The median of all rounds is shown, with the
lowest and the highest.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

KIB, MIB = 2**10, 2**20
PIECES = (4 * KIB, 64 * KIB, 2 * MIB)
COPIED = 256 * MIB

libc = ctypes.CDLL(None, use_errno=True)
libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class Way:
    """A way to take the pool, and what was seen of it.

    Args:
        title: for a reader.
        advice: what the kernel is told of its pages.
        lock: whether they are locked.
        take_s: seconds that taking it took, of each round.
        rates: bytes per piece -> bytes per second, of each round.
    """

    title: str
    advice: int
    lock: bool
    take_s: list[float] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in PIECES})


WAYS = [
    Way(f"{pages}{', locked' if lock else ''}", advice, lock)
    for pages, advice in (
        ("pages of 4 KiB", mmap.MADV_NOHUGEPAGE),
        ("huge pages of 2 MiB (madvise)", mmap.MADV_HUGEPAGE),
    )
    for lock in (False, True)
]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(way: Way, pool_bytes: int, target: np.ndarray, seed: int) -> None:
    """Take a pool and copy out of it; with its last reference it is given back."""
    memory = mmap.mmap(-1, pool_bytes)
    memory.madvise(way.advice)
    pool = np.frombuffer(memory, np.uint8)
    address = pool.ctypes.data

    def take() -> None:
        pool[:: 4 * KIB] = 1  # every page is touched
        if way.lock and libc.mlock(address, pool_bytes):
            raise OSError(ctypes.get_errno(), f"mlock of {pool_bytes} bytes (ulimit -l)")

    way.take_s.append(timed(take))
    random = np.random.default_rng(seed)
    for size in PIECES:
        pieces, rows = pool.reshape(-1, size), target.reshape(-1, size)
        order = random.choice(len(pieces), COPIED // size, replace=False)
        copy = partial(np.take, pieces, order, axis=0, out=rows, mode="clip")
        way.rates[size].append(COPIED / timed(copy))


def spread(values: list[float], unit: float) -> str:
    """Return the median, and the range."""
    low, high = min(values) / unit, max(values) / unit
    return f"{statistics.median(values) / unit:.2f} ({low:.2f} to {high:.2f})"


def main(
    pool_gib: Annotated[int, typer.Option(min=1, help="Size of the pool.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
) -> None:
    """Measure, and print a table for docs/results."""
    pool_bytes = pool_gib * 2**30
    target = np.ones(COPIED, np.uint8)
    for seed in range(rounds):
        for way in WAYS:
            measure(way, pool_bytes, target, seed)
    table = Table(box=None)
    sizes = [f"{size // KIB} KiB pieces, GB/s" for size in PIECES]
    for name in ("pool", "taken in, s", *sizes):
        table.add_column(name)
    for way in WAYS:
        rates = [spread(way.rates[size], 1e9) for size in PIECES]
        table.add_row(way.title, spread(way.take_s, 1), *rates)
    console = Console(width=160)
    console.print(f"pool of {pool_gib} GiB, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
