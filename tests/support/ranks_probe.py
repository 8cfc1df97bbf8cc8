"""A real vLLM on CPU with real LMCache and two ranks: bytes of each, and faults of the second.

Run by engine/test_ranks.py, with MODEL DISK MODE LOADS; prints a JSON object last. The ranks are
processes of their own, in which the functions here that take a worker run.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from typing import Any

from support.probes import end_with
from support.real_engine import CHUNK, LENGTHS, Engine, digests, prompt, restored

# And chunks of a prompt.
FAULTS = {
    "loses a chunk": 2,
    "fails its loads": 3,
    "computes behind": 4,
    "has a full disk": 5,
    "has a slow disk": 6,
}
SLOW_S = 1.5  # what a read of one file takes then


def tiers(worker) -> dict[str, Any]:
    """Of this rank, when all that it stores is in them."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    connector.worker_side.in_flight.drain()
    backends = connector._lmcache_engine.lmcache_engine.storage_manager.storage_backends
    for name in list(backends["disk"]._writes.pending):
        backends["disk"]._writes.settle(name)
    return backends


def memory(worker) -> dict[str, Any]:
    """Of this rank's CPU tier: its bytes, those in use, and each entry's by its name."""
    backend = tiers(worker)["LocalCPUBackend"]
    allocator = backend.memory_allocator
    return {
        "bytes": allocator.buffer.nbytes,
        "used": allocator.pin_allocator.total_allocated_size,
        "entries": {
            f"{key.chunk_hash}, {getattr(key, 'layer_id', 'whole')}": obj.get_size()
            for key, obj in backend.hot_cache.items()
        },
    }


def leave_disk(worker):
    """Empty the CPU tier."""
    memory = tiers(worker)["LocalCPUBackend"]
    memory.batched_remove(memory.get_keys())


def disk_files(worker):
    return len(list(tiers(worker)["disk"]._store.directory.glob("*.lmxkv")))


def second(worker) -> bool:
    return worker.model_runner.parallel_config.rank == 1


def lose_a_chunk(worker):
    """The second rank has one chunk less of what was stored last, and nothing on disk."""
    if second(worker):
        memory = tiers(worker)["LocalCPUBackend"]
        lost = memory.get_keys()[-1].chunk_hash
        memory.batched_remove([key for key in memory.get_keys() if key.chunk_hash == lost])
        tiers(worker)["disk"]._store.clear()


def fail_loads(worker):
    """The second rank can't write what it loads to its KV cache."""
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    def failing(*args):
        raise RuntimeError("planted")

    if second(worker):
        worker.scatter, TorchTransfer.scatter = TorchTransfer.scatter, failing


def mend_loads(worker):
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    if second(worker):
        TorchTransfer.scatter = worker.scatter


def fill_disk(worker):
    """The second rank's disk has no room for another file."""
    if second(worker):

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        tiers(worker)["disk"]._store._write = full


def slow_disk(worker):
    """The second rank waits for each file that it reads."""
    if second(worker):
        reads = tiers(worker)["disk"]._reads
        fill = reads._fill

        def slow(read):
            time.sleep(SLOW_S)
            return fill(read)

        reads._fill = slow


def mend_disk(worker):
    if second(worker):
        del tiers(worker)["disk"]._reads._fill


class Case:
    """Prompts that are computed, and asked again."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rpc = engine, engine.llm.collective_rpc

    def compute(self, tokens: list[int]) -> list[list[list[str]]]:
        self.engine.forget()
        self.answer = self.engine.ask(tokens)
        return self.rpc(digests)

    def again(self, tokens: list[int], cold: list[list[list[str]]]) -> dict[str, Any]:
        """What a hit wrote, by rank."""
        before, begin = self.engine.external_hits(), time.monotonic()
        self.engine.forget()
        answer = self.engine.ask(tokens)
        return {
            "right": answer == self.answer,
            "seconds": time.monotonic() - begin,
            "hit": self.engine.external_hits() - before,
            "restored": [restored(*both) for both in zip(cold, self.rpc(digests), strict=True)],
        }

    def hits(self, length: int) -> dict[str, Any]:
        """From memory, and from disk."""
        tokens = prompt(length)
        cold = self.compute(tokens)
        report = {"memory": self.again(tokens, cold)}
        self.rpc(leave_disk)
        return report | {"disk": self.again(tokens, cold)}

    def faulty(self, chunks: int, plant: Callable, mend: Callable | None) -> dict[str, Any]:
        """Stored by sound ranks, asked again with a fault of one, and once more without."""
        tokens = prompt(chunks * CHUNK + 50)
        cold = self.compute(tokens)
        self.rpc(plant)
        report = {"faulty": self.again(tokens, cold)}
        if mend:
            self.rpc(mend)
        return report | {"afterwards": self.again(tokens, cold)}

    def behind_a_failed_load(self, chunks: int) -> dict[str, Any]:
        """Two chunks are loaded, which fails on one rank, and more computed in the same steps."""
        base, tokens = prompt(2 * CHUNK), prompt(chunks * CHUNK + 51)
        tokens = base + tokens[len(base) :]
        self.engine.forget()
        self.answer = self.engine.ask(tokens, cache_salt="apart")
        cold = self.rpc(digests)
        self.compute_only(base)
        self.rpc(fail_loads)
        report = {"faulty": self.again(tokens, cold)}
        self.rpc(mend_loads)
        return report | {"afterwards": self.again(tokens, cold)}

    def compute_only(self, tokens: list[int]) -> None:
        self.engine.forget()
        self.engine.ask(tokens)

    def full_disk(self, chunks: int) -> dict[str, Any]:
        self.rpc(fill_disk)
        tokens = prompt(chunks * CHUNK + 50)
        files = self.rpc(disk_files)
        cold = self.compute(tokens)
        self.rpc(leave_disk)
        written = [
            after - before for before, after in zip(files, self.rpc(disk_files), strict=True)
        ]
        report = {"written": written, "faulty": self.again(tokens, cold)}
        return report | {"afterwards": self.again(tokens, cold)}

    def slow_disk(self, chunks: int) -> dict[str, Any]:
        """Read while nobody else asks, and beside a request that has nothing to load."""
        tokens, other = prompt(chunks * CHUNK + 50), prompt(CHUNK - 50)
        self.engine.forget()
        computed = self.engine.ask(other)
        cold = self.compute(tokens)
        self.rpc(leave_disk)
        self.rpc(slow_disk)
        report: dict[str, Any] = {"faulty": self.again(tokens, cold)}
        self.rpc(leave_disk)
        self.engine.forget()
        ended = self.engine.race([tokens, other])
        report["beside"] = {
            "right": sorted(ended) == [(0, self.answer), (1, computed)],
            "first": ended[0][0],
        }
        self.rpc(mend_disk)
        self.rpc(leave_disk)
        return report | {"afterwards": self.again(tokens, cold)}


def probe(engine: Engine) -> dict[str, Any]:
    case = Case(engine)
    report: dict[str, Any] = {name: case.hits(length) for name, length in LENGTHS.items()}
    chunks = FAULTS
    report["loses a chunk"] = case.faulty(chunks["loses a chunk"], lose_a_chunk, None)
    report["fails its loads"] = case.faulty(chunks["fails its loads"], fail_loads, mend_loads)
    report["computes behind"] = case.behind_a_failed_load(chunks["computes behind"])
    report["has a slow disk"] = case.slow_disk(chunks["has a slow disk"])
    report["has a full disk"] = case.full_disk(chunks["has a full disk"])
    return report


if __name__ == "__main__":
    model, disk, mode, loads = sys.argv[1:]
    options = {"tensor_parallel_size": 2, "settings": {"loads": loads}}
    end_with(lambda: Engine(model, disk, mode, **options).close_after(probe))
