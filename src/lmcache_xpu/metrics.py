"""The package's own metrics; on the engine's /metrics when PROMETHEUS_MULTIPROC_DIR is set.

Direction is `store` or `load`. Tier `cpu` is between the engine's KV cache and host memory, `disk`
between host memory and files, `shared` between host memory and a Valkey or Redis server; so a load
from the latter two counts in `cpu` as well. `server` is between the engine's KV cache and the
memory of LMCache's server. The engine runs in processes of its own: `serve` gives them all one
directory, where prometheus_client keeps its files and from which vLLM's server sums them up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from prometheus_client import Counter, Gauge

Direction = Literal["store", "load"]
Tier = Literal["cpu", "disk", "shared", "server"]

_MOVE = ("direction", "tier")
_COUNTERS = {
    name: Counter(f"lmcache_xpu_{name}_total", description, labels)
    for name, description, labels in (
        ("bytes", "Bytes of KV cache moved.", _MOVE),
        ("tokens", "Tokens whose KV cache was moved.", _MOVE),
        ("seconds", "Seconds that moves took.", _MOVE),
        ("errors", "Moves that failed.", (*_MOVE, "reason")),
        ("evicted", "Objects that made room for others.", ("tier",)),
        ("fallbacks", "Loads that ended in recomputing.", ("reason",)),
        ("loads", "Loads that have begun, of one worker each.", ("way",)),
    )
}
LEVELS: dict[str, Level] = {}  # by name

_lock = threading.Lock()
# Since `take`: counts by a counter's name and its labels, and values by a level's name.
_recent: defaultdict[str, float] = defaultdict(float)
_values: dict[str, float] = {}
_changed = threading.Event()  # a value


def take() -> tuple[dict[str, float], dict[str, float]]:
    """Return the counts of this process since the last call, and its levels if one has changed.

    Increases are by a counter's name and its labels, e.g. `bytes load cpu`, and values by a level's
    name. Both are empty if nothing has happened.
    """
    if not (_recent or _changed.is_set()):  # without the lock: asked in every step
        return {}, {}
    with _lock:
        counts, levels = dict(_recent), dict(_values) if _changed.is_set() else {}
        _recent.clear()
        _changed.clear()
    return counts, levels


def add(counts: Mapping[str, float]) -> None:
    """Add what another process counted to this one's /metrics; see `take`."""
    for key, amount in counts.items():
        name, *labels = key.split(" ")
        _COUNTERS[name].labels(*labels).inc(amount)


def _count(name: str, labels: tuple[str, ...], amount: float) -> None:
    _COUNTERS[name].labels(*labels).inc(amount)
    with _lock:
        _recent[" ".join((name, *labels))] += amount


class Level:
    """A gauge of which each process has its own value."""

    def __init__(self, name: str, description: str) -> None:
        self._name = name
        # The sum over all processes, each of which has a directory of its own.
        self.gauge = Gauge(f"lmcache_xpu_{name}", description, multiprocess_mode="sum")
        LEVELS[name] = self

    def set(self, value: float) -> None:
        """Set the value in this process."""
        self.gauge.set(value)
        with _lock:
            _values[self._name] = value
            _changed.set()


CPU_USED_BYTES = Level("cpu_used_bytes", "Bytes that the CPU tier holds.")
CPU_LIMIT_BYTES = Level("cpu_limit_bytes", "Bytes that the CPU tier may hold.")
DISK_USED_BYTES = Level("disk_used_bytes", "Bytes that the disk tier holds.")
DISK_LIMIT_BYTES = Level("disk_limit_bytes", "Bytes that the disk tier may hold.")


class Flow:
    """Counters of one direction between two places, and why a move may fail and what to do then."""

    def __init__(self, direction: Direction, tier: Tier, reasons: Mapping[str, str]) -> None:
        self.direction, self.tier, self.reasons = direction, tier, reasons
        # The first increase is one only where there was a zero.
        for name in ("bytes", "tokens", "seconds"):
            _COUNTERS[name].labels(direction, tier)
        for reason in reasons:
            _COUNTERS["errors"].labels(direction, tier, reason)

    def moved(self, seconds: float, *, size_bytes: int, tokens: int) -> None:
        """Count a move that has ended well."""
        for name, amount in (("bytes", size_bytes), ("tokens", tokens), ("seconds", seconds)):
            _count(name, (self.direction, self.tier), amount)

    def failed(self, reason: str, moves: int = 1) -> None:
        """Count moves that have failed; `reason` is one of a few words, or an error's class."""
        if moves:
            _count("errors", (self.direction, self.tier, reason), moves)


def fallback(reason: str) -> None:
    """Count a request whose load ended in recomputing."""
    _count("fallbacks", (reason,), 1)


def evicted(objects: int) -> None:
    """Count objects that made room in the CPU tier."""
    if objects:
        _count("evicted", ("cpu",), objects)


def loaded(way: Literal["step", "async", "computed"], loads: int = 1) -> None:
    """Count loads that begin, and hits that are computed; see `LOAD_WAYS`."""
    if loads:
        _count("loads", (way,), loads)


# What a reason means, and what to do. Another one is the class of the error that was raised.
_LATE = "The engine took longer than memory is lent for. No action"
_UNFILLED = "It was computed from a load that failed. It is computed and stored anew"
_SERVER_LOST = "LMCache's server did not answer. Nothing moves until it does: look at its log"
_REASONS: dict[tuple[Direction, Tier], dict[str, str]] = {
    ("store", "cpu"): {
        "late": _LATE,
        "overtaken": "The engine needed the blocks before they were copied. Accept fewer hits",
        "unfilled": _UNFILLED,
    },
    ("load", "cpu"): {
        "incomplete": "Fewer tokens came than were promised. They are computed. No action",
        "late": _LATE,
        "missing": "What was promised was gone. It is computed. No action",
        "RuntimeError": "The move raised: the log has the cause. Other classes of errors likewise",
    },
    ("store", "disk"): {
        "behind": "The engine is faster than the disk. Use a faster one, or accept fewer hits",
        "crowded": "What the tier holds was used later, or is being written. Raise `disk_gib`",
        "full": "The disk itself is full. Free space, or lower `disk_gib`",
        "io": "The file system reported an error: look at the log and at the disk",
    },
    ("load", "disk"): {
        "corrupt": "A file failed its checksum and was removed. If it repeats, check the disk",
        "io": "A file could not be read. Look at the log and at the disk",
        "pool_full": "The CPU tier had no room to load through. Raise `cpu_gib`",
    },
    ("store", "shared"): {
        "behind": "The engine is faster than the network. Accept fewer hits, or widen it",
        "full": "The server has no memory left. Give it more, or a policy that evicts",
        "refused": "The server refuses writes: the log has its words. Check its rights",
        "server": "The server did not answer in time. It is left alone, and tried again later",
    },
    ("load", "shared"): {
        "corrupt": "A damaged value, or of another layout, was deleted. If it repeats: the server",
        "server": "The server did not answer in time. It is left alone, and tried again later",
    },
    ("store", "server"): {
        "late": _LATE,
        "overtaken": "The engine needed the blocks before the server answered. Accept fewer hits",
        "refused": "The server did not take what was stored. Look at its log",
        "server": _SERVER_LOST,
        "unfilled": _UNFILLED,
    },
    ("load", "server"): {
        "damaged": "The server's memory held something else, or half of it. It was computed",
        "late": _LATE,
        "missing": "What was promised was gone: evicted, or the server is another one. No action",
        "server": _SERVER_LOST,
    },
}
FLOWS = tuple(Flow(direction, tier, reasons) for (direction, tier), reasons in _REASONS.items())
STORE_CPU, LOAD_CPU, STORE_DISK, LOAD_DISK, STORE_SHARED, LOAD_SHARED, *_ = FLOWS
STORE_SERVER, LOAD_SERVER = FLOWS[6:]
# Of requests whose KV cache did not arrive.
FALLBACK_REASONS = {
    "load": "A load failed or was incomplete. The errors say why",
    "request": "What a client sent made the connector fail. The log says how",
}
for _reason in FALLBACK_REASONS:
    _COUNTERS["fallbacks"].labels(_reason)
# How a load runs; docs/reference/metrics.md shows it.
LOAD_WAYS = {
    "step": "Inside the step of its request, while layers are computed",
    "async": "While its request waits and others are computed",
    "computed": "Not at all: its tokens were computed, which is measured to take no longer",
}
for _way in LOAD_WAYS:
    _COUNTERS["loads"].labels(_way)
