"""A real vLLM on CPU with LMCache's own engine in several ranks: bytes of each, and faults.

The faults are of the second rank. Run by engine/test_ranks.py, with MODEL DISK RANKS; prints a JSON
object last.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

from support.probes import end_with
from support.ranks import Case, disk_files, fail_loads, leave_disk, rank, tiers
from support.real_engine import LENGTHS, Engine

# And chunks of a prompt.
FAULTS = {
    "loses a chunk": 2,
    "fails its loads": 3,
    "computes behind": 4,
    "has a full disk": 5,
}


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


def probe(engine: Engine) -> dict[str, Any]:
    case, behind = Case(engine), FAULTS["computes behind"]
    return {
        **{name: case.hits(length) for name, length in LENGTHS.items()},
        "loses a chunk": case.planted(*case.stored(FAULTS["loses a chunk"]), lose_a_chunk, None),
        "fails its loads": case.planted(*case.stored(FAULTS["fails its loads"]), fail_loads),
        "computes behind": case.planted(*case.beginning_stored(behind), fail_loads),
        "has a full disk": with_a_full_disk(case, FAULTS["has a full disk"]),
    }


if __name__ == "__main__":
    model, disk, ranks = sys.argv[1:]
    options = {"tensor_parallel_size": int(ranks)}
    end_with(lambda: Engine(model, disk, "layerwise", **options).close_after(probe))
