"""A real vLLM on CPU with real LMCache and several ranks: bytes of each, and faults of the second.

Run by engine/test_ranks.py, with MODEL DISK MODE LOADS RANKS; prints a JSON object last.
"""

from __future__ import annotations

import errno
import sys
import time
from typing import Any

from support.probes import end_with
from support.ranks import Case, disk_files, fail_loads, leave_disk, rank, tiers
from support.real_engine import CHUNK, LENGTHS, Engine, prompt

# And chunks of a prompt.
FAULTS = {
    "loses a chunk": 2,
    "fails its loads": 3,
    "computes behind": 4,
    "has a full disk": 5,
    "has a slow disk": 6,
}
SLOW_S = 1.5  # what a read of one file takes then


def watch_loads(worker):
    """Count the loads that begin with their step."""
    from lmcache_xpu.kv_connector.step_loads import StepLoads

    begin = StepLoads.begin
    worker.loads = 0

    def begin_with_step(loads):
        worker.loads += loads.count
        begin(loads)

    StepLoads.begin = begin_with_step


def loads_watched(worker):
    return worker.loads


def lose_a_chunk(worker):
    """The second rank has one chunk less of what was stored last, and nothing on disk."""
    if rank(worker) == 1:
        memory = tiers(worker)["LocalCPUBackend"]
        lost = memory.get_keys()[-1].chunk_hash
        memory.batched_remove([key for key in memory.get_keys() if key.chunk_hash == lost])
        tiers(worker)["disk"]._store.clear()


def fill_disk(worker):
    """The second rank's disk has no room for another file."""
    if rank(worker) == 1:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        tiers(worker)["disk"]._store._write = full


def slow_disk(worker):
    """The second rank waits for each file that it reads."""
    if rank(worker) == 1:
        reads = tiers(worker)["disk"]._reads
        fill = reads._fill

        def slow(read):
            time.sleep(SLOW_S)
            return fill(read)

        reads._fill = slow


def mend_disk(worker):
    if rank(worker) == 1:
        del tiers(worker)["disk"]._reads._fill


def with_a_full_disk(case: Case, chunks: int) -> dict[str, Any]:
    case.rpc(fill_disk)
    files = case.rpc(disk_files)
    tokens, cold = case.stored(chunks)
    case.rpc(leave_disk)
    written = [after - before for before, after in zip(files, case.rpc(disk_files), strict=True)]
    return {
        "written": written,
        "faulty": case.again(tokens, cold),
        "afterwards": case.again(tokens, cold),
    }


def with_a_slow_disk(case: Case, chunks: int) -> dict[str, Any]:
    """Read while nobody else asks, and beside a request that has nothing to load."""
    engine, other = case.engine, prompt(CHUNK - 50)
    engine.forget()
    computed = engine.ask(other)
    tokens, cold = case.stored(chunks)
    case.rpc(leave_disk)
    case.rpc(slow_disk)
    report: dict[str, Any] = {"faulty": case.again(tokens, cold)}
    case.rpc(leave_disk)
    engine.forget()
    ended = engine.race([tokens, other])
    report["beside"] = {
        "right": sorted(ended) == [(0, case.answer), (1, computed)],
        "first": ended[0][0],
    }
    case.rpc(mend_disk)
    case.rpc(leave_disk)
    return report | {"afterwards": case.again(tokens, cold)}


def probe(engine: Engine) -> dict[str, Any]:
    case, behind = Case(engine), FAULTS["computes behind"]
    case.rpc(watch_loads)
    return {
        **{name: case.hits(length) for name, length in LENGTHS.items()},
        "loads": case.rpc(loads_watched),
        "loses a chunk": case.planted(*case.stored(FAULTS["loses a chunk"]), lose_a_chunk, None),
        "fails its loads": case.planted(*case.stored(FAULTS["fails its loads"]), fail_loads),
        "computes behind": case.planted(*case.beginning_stored(behind), fail_loads),
        "has a slow disk": with_a_slow_disk(case, FAULTS["has a slow disk"]),
        "has a full disk": with_a_full_disk(case, FAULTS["has a full disk"]),
    }


if __name__ == "__main__":
    model, disk, mode, loads, ranks = sys.argv[1:]
    options = {"tensor_parallel_size": int(ranks), "settings": {"loads": loads}}
    end_with(lambda: Engine(model, disk, mode, **options).close_after(probe))
