"""What vLLM's own tier of files does with damage, churn, kills and many files, and what ours does.

    PYTHONPATH=src:tests python measurements/vllm_tiers.py flips --directory /path/on/the/disk

Both stand behind the same host memory, by vLLM's own interface of secondary tiers. Each step
prints JSON. Nothing but a disk is needed; vLLM 0.30 or newer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from support.offloading import Host, files, key, ours, served

from lmcache_xpu.tiers.disk.chunk_file import file_name, write_chunk

MIB, GIB = 2**20, 2**30
SMALL = 64 * 1024  # bytes of a chunk, where files are counted
LARGE = 2 * MIB  # where bytes are
TIERS = {"ours": ".lmxkv", "fs": ".bin"}  # the ends of their files' names
app = typer.Typer(add_completion=False, help=__doc__)
Directory = Annotated[Path, typer.Option(help="An empty one, on the disk to be measured")]


def host(tier: str, directory: Path, gib: float = 1, **shape: int) -> Host:
    """Return host memory with a tier behind it."""
    config = ours(directory, gib) if tier == "ours" else {"type": "fs", "root_dir": str(directory)}
    return Host(config, chunk_bytes=shape.pop("chunk_bytes", SMALL), **shape)


def content(number: int, size: int = SMALL) -> np.ndarray:
    """Return the bytes of a chunk, by its number."""
    return np.random.default_rng(number).integers(-128, 128, size, np.int8)


def used(directory: Path) -> int:
    """Count the bytes of the disk's blocks that all files take, unfinished ones too."""
    total = 0
    for path in directory.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        total += 0 if path.is_dir() else status.st_blocks * 512
    return total


@app.command()
def flips(directory: Directory, count: int = 1000) -> None:
    """Flip one bit of a stored file, load its chunk, and say what came of it."""
    report = {}
    for tier, suffix in TIERS.items():
        place = directory / tier
        behind, path_of, rng = host(tier, place), {}, random.Random(1)
        numbers = range(64)
        for number in numbers:
            before = set(files(place, suffix))
            behind.memory[0] = content(number)
            behind.store([key(number)], behind.request(f"store {number}"))
            [path_of[number]] = set(files(place, suffix)) - before
        seen = {"served wrong": 0, "missed": 0, "served right": 0}
        for flip in range(count):
            number = rng.choice(numbers)
            path, context = path_of[number], behind.request(f"load {flip}")
            whole = path.read_bytes()
            hurt, bit = bytearray(whole), rng.randrange(8 * len(whole))
            hurt[bit // 8] ^= 1 << bit % 8
            path.write_bytes(hurt)
            behind.memory[0] = 0
            each = key(number)
            hit = behind.found(each, context) == "HIT"
            hit = hit and bool(served(behind.load([each], context), [each]))
            right = (behind.memory[0] == content(number)).all()
            seen["missed" if not hit else "served right" if right else "served wrong"] += 1
            behind.finish(context)
            path.unlink(missing_ok=True)
            behind.memory[0] = content(number)
            behind.store([each], behind.request(f"again {flip}"))
        behind.close()
        report[tier] = seen
    print(json.dumps(report))


@app.command()
def churn(directory: Directory, tier: str, seconds: float = 300, mb_s: float = 40) -> None:
    """Store new chunks all the time, and look at the bytes that the directory takes."""
    bound = GIB
    behind, begun, jobs, looked, most = host(tier, directory, bound / GIB), time.time(), 0, 0.0, 0
    while (now := time.time() - begun) < seconds:
        if now * mb_s * 1e6 < jobs * 32 * SMALL:
            time.sleep(0.01)
            continue
        keys = [key(jobs * 32 + at) for at in range(32)]
        context = behind.request(f"{jobs}", keys)
        behind.memory[:32, :8] = jobs % 127
        behind.store(keys, context)
        behind.finish(context)
        jobs += 1
        if now - looked > 2:
            looked, most = now, max(most, used(directory))
    most = max(most, used(directory))
    written = jobs * 32 * SMALL
    behind.close()
    print(json.dumps({"tier": tier, "written": written, "most": most, "over": most - bound}))


def _stores_until_killed(tier: str, directory: Path, first: int, out: int) -> None:
    """Load what is there, report it, then store for ever."""
    behind = host(tier, directory)
    context, hits, wrong = behind.request("look"), 0, 0
    for number in range(max(0, first - 200), first):
        if behind.found(key(number), context) != "HIT":
            continue
        if served(behind.load([key(number)], context), [key(number)]):
            hits += 1
            wrong += not (behind.memory[0] == content(number)).all()
    os.write(out, f"{hits} {wrong}\n".encode())
    for number in range(first, first + 10**6):
        behind.memory[0] = content(number)
        behind.store([key(number)], behind.request(f"{number}"))
        os.write(out, b".")


@app.command()
def kills(directory: Directory, count: int = 100) -> None:
    """Kill a process that stores, as often as asked; say what each next one finds."""
    from vllm.v1.kv_offload import file_mapper  # before the forks, not in each

    report: dict[str, Any] = {"vLLM's module": file_mapper.__name__}
    for tier in TIERS:
        place, rng, first = directory / tier, random.Random(2), 0
        started = hits = wrong = 0
        host(tier, place).close()
        for _ in range(count):
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                _stores_until_killed(tier, place, first, into)
            os.close(into)
            with os.fdopen(out, "rb") as pipe:
                line = pipe.readline().split()
                if len(line) == 2:
                    started += 1
                    hits, wrong = hits + int(line[0]), wrong + int(line[1])
                time.sleep(rng.uniform(0.01, 0.3))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                first += len(pipe.read()) + 1  # the one under way too
        left = [path.name for path in place.rglob("*.tmp")]
        host(tier, place).close()
        after = len(list(place.rglob("*.tmp")))
        report[tier] = {
            **{"started": started, "stored": first, "loaded": hits, "wrong": wrong},
            **{"unfinished files": len(left), "after a last start": after},
        }
    print(json.dumps(report))


@app.command()
def start(directory: Directory, count: int = 1_000_000) -> None:
    """Fill a directory with files of 8 KiB, and start with it: ours lists the directory.

    One that has as many already is not filled again.
    """
    behind = host("ours", directory, gib=64)
    store, identity = behind.tier._store, behind.tier._identity
    place, payload = store.directory, memoryview(bytes(4096))
    paths = [(f"{identity}:{key(number).hex()}", number) for number in range(count)]
    begun = time.time()
    for name, number in paths if len(store) != count else ():
        write_chunk(place / file_name(name), name, "", payload, number + 1)
    filled = time.time() - begun
    behind.close()
    starts = []
    for _ in range(2):
        begun, cpu = time.time(), time.process_time()
        behind = host("ours", directory, gib=64)
        seconds = {"all": time.time() - begun, "of a CPU": time.process_time() - cpu}
        starts.append({name: round(each, 2) for name, each in seconds.items()})
        chunks = len(behind.tier._store)
        behind.close()
    print(json.dumps({"files": count, "chunks": chunks, "filled_s": filled, "starts_s": starts}))


def _drop(paths: list[Path]) -> None:
    """Write files out, four at a time, and drop them from the page cache."""

    def drop(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(drop, paths))


@app.command()
def speed(directory: Directory, rounds: int = 3, jobs: int = 16) -> None:
    """Store and load GiB in jobs of 32 chunks of 2 MiB."""
    report: dict[str, list[Any]] = {}
    size = jobs * 32 * LARGE / 1e9
    for turn in range(rounds):
        for tier, suffix in TIERS.items():
            place = directory / f"{tier} {turn}"
            behind = host(tier, place, gib=8, rows=160, chunk_bytes=LARGE)
            behind.memory[:] = np.random.default_rng(turn).integers(-128, 128, LARGE, np.int8)
            keys = [[key(job * 32 + at) for at in range(32)] for job in range(jobs)]
            context, times = behind.request("all"), []
            begun = time.time()
            for job in keys:
                assert behind.store(job, context).success
            times.append(time.time() - begun)
            _drop(files(place, suffix))
            times.append(time.time() - begun)
            for _ in range(2):  # from the disk, then from the page cache where there is one
                begun = time.time()
                for job in keys:
                    assert behind.load(job, context).success
                times.append(time.time() - begun)
            behind.close()
            shutil.rmtree(place)
            report.setdefault(tier, []).append([round(size / each, 2) for each in times])
    print(json.dumps({"GB/s: stored, on the disk, cold, again": report}))


if __name__ == "__main__":
    app()
