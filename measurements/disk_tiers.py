"""Store and load GB/s of three disk tiers in LMCache's own storage manager.

    python measurements/disk_tiers.py --directory /path/on/the/disk

Store is from `batched_put` until the last write has ended; load is `batched_get` of all chunks.
"warm" reads what was just written, from the page cache; "cold" first writes it out and drops it
from there. Nothing but a disk is needed.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager
from rich.console import Console
from rich.table import Table

from lmcache_xpu.versions.lmcache import in_process_module

EventManager = in_process_module("v1.event_manager").EventManager
PinMonitor = in_process_module("v1.pin_monitor").PinMonitor

MIB = 1 << 20
TOKENS, HEADS, DIM = 256, 8, 128
LAYER_BYTES = 2 * TOKENS * HEADS * DIM * 2  # 1 MiB in bfloat16


@dataclass(frozen=True)
class Tier:
    """A tier to measure: LMCache's name for it, and its configuration in a directory."""

    title: str
    location: str
    settings: dict[str, object] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)


def tiers(directory: Path, gib: float) -> list[Tier]:
    """Return the three tiers, each in a directory of its own."""
    return [
        Tier(
            "LMCache fs remote",
            "RemoteBackend-fs",
            {"remote_storage_plugins": ["fs"], "remote_serde": "naive"},
            {"remote_storage_plugin.fs.base_path": str(directory / "fs")},
        ),
        Tier(
            "LMCache LocalDiskBackend",
            "LocalDiskBackend",
            {"local_disk": f"{directory / 'stock'}/", "max_local_disk_size": gib},
        ),
        Tier(
            "lmcache-xpu DiskTier",
            "disk",
            {"storage_plugins": ["disk"]},
            {
                "storage_plugin.disk.module_path": "lmcache_xpu.tiers.stock_disk",
                "storage_plugin.disk.class_name": "DiskTier",
                "disk.path": str(directory / "ours"),
                "disk.gib": gib,
            },
        ),
    ]


def open_manager(tier: Tier, layers: int, pool_bytes: int) -> StorageManager:
    """Open a storage manager with no other tier above its CPU pool."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=pool_bytes / 2**30,
        pre_caching_hash_algorithm="sha256_cbor",
        extra_config=tier.extra,
        **tier.settings,
    )
    PinMonitor.GetOrCreate(config)
    metadata = LMCacheMetadata(
        model_name="benchmark",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, TOKENS, HEADS, DIM),
        role="worker",
        chunk_size=TOKENS,
    )
    return StorageManager(config, metadata, EventManager())


def store(manager: StorageManager, tier: Tier, keys: list[CacheEngineKey], layers: int) -> float:
    """Store one chunk under each key; returns seconds."""
    shape = torch.Size([2, layers, TOKENS, HEADS * DIM])
    objs = [manager.allocate(shape, torch.bfloat16, busy_loop=False) for _ in keys]
    for number, obj in enumerate(objs):
        obj.tensor.fill_(number)
    backend = manager.storage_backends[tier.location]
    start = time.perf_counter()
    manager.batched_put(keys, objs)
    while any(backend.exists_in_put_tasks(key) for key in keys):
        time.sleep(0.0005)
    return time.perf_counter() - start


def load(manager: StorageManager, tier: Tier, keys: list[CacheEngineKey]) -> float:
    """Load all chunks into the CPU pool; returns seconds."""
    start = time.perf_counter()
    objs = manager.storage_backends[tier.location].batched_get_blocking(keys)
    seconds = time.perf_counter() - start
    for number, obj in enumerate(objs):
        if obj is None or not bool((obj.tensor == number).all()):
            raise RuntimeError(f"{tier.title} lost chunk {number}")
        obj.ref_count_down()
    return seconds


def drop_from_page_cache(directory: Path) -> None:
    """Write all files out and forget their pages; needs no privileges."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(tier: Tier, directory: Path, layers: int, total: int, rounds: int) -> list[float]:
    """Measure store, warm load and cold load; returns their medians in GB/s."""
    count = total // (layers * LAYER_BYTES)
    manager = open_manager(tier, layers, pool_bytes=3 * total)
    seconds: list[tuple[float, float, float]] = []
    for turn in range(rounds + 1):
        keys = [
            CacheEngineKey("benchmark", 1, 0, 1 + turn * count + number, torch.bfloat16)
            for number in range(count)
        ]
        store_s = store(manager, tier, keys, layers)
        warm_s = load(manager, tier, keys)
        drop_from_page_cache(directory)
        seconds.append((store_s, warm_s, load(manager, tier, keys)))
        manager.batched_remove(keys, [tier.location])
    manager.close()
    # The first round is a warm-up: pages of the pool, threads, imports.
    return [total / statistics.median(column) / 1e9 for column in zip(*seconds[1:], strict=True)]


def main(
    directory: Annotated[Path, typer.Option(help="Where to make a temporary directory")] = Path(),
    chunks: Annotated[list[int] | None, typer.Option(help="Chunk sizes, MiB")] = None,
    total: Annotated[int, typer.Option(help="MiB stored and loaded in a round")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts")] = 5,
) -> None:
    """Measure the three tiers and print a table."""
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).disabled = name.startswith(("lmcache", "vllm"))
    table = Table("tier", "chunk MiB", "store GB/s", "warm load", "cold load")
    place = Path(tempfile.mkdtemp(dir=directory, prefix="disk-tier-"))
    try:
        for layers in chunks or [2, 8, 32]:
            # LocalDiskBackend never gets back the room of what is removed: enough for all rounds.
            for tier in tiers(place, gib=(rounds + 2) * total / 1024):
                rates = measure(tier, place, layers, total * MIB, rounds)
                table.add_row(tier.title, str(layers), *(f"{rate:.2f}" for rate in rates))
    finally:
        shutil.rmtree(place)
    console = Console()
    console.print(table)
    console.print(f"{os.cpu_count()} CPUs, {total} MiB a round, median of {rounds} rounds")


if __name__ == "__main__":
    typer.run(main)
