"""A server that is killed where `/dev/shm` has room for its memory once, and started again.

Run by engine/test_server_memory.py with DIRECTORY, where `/dev/shm` is its own and small. A worker
without an engine maps the memory meanwhile. Prints a JSON object last.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from support.cache_server import CacheServer
from support.lending import BLOCK, filled
from support.probes import end_with
from support.server_adapters import adapter_at

from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.kv_cache_groups import CacheGroup
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter
from lmcache_xpu.transfer.devices import register_host

CHUNK, BLOCKS = 128, 40


def wait_for(seen: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not (result := seen()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(result)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def main(directory: Path) -> dict[str, Any]:
    server = CacheServer(directory / "server.log", chunk_tokens=CHUNK, cpu_gib=0.1)
    server.start(["-m", "lmcache_xpu.launch.cache_server"])
    try:
        with adapter_at(server.url, WorkerAdapter, BLOCK, wait_s=1.0, beat_s=1.0) as adapter:
            return look(server, adapter)
    finally:
        server.end()


def look(server: CacheServer, adapter: WorkerAdapter) -> dict[str, Any]:
    caches = {"layer": filled(1, blocks=BLOCKS)}
    group = CacheGroup(number=0, layers=("layer",), block_tokens=BLOCK)
    copies = [GroupCopies(group, caches, BLOCKS, CHUNK, None, register_host)]
    adapter.register(caches, copies, timeout_s=1.0, draft_layers=0)

    blocks = list(range(1, 1 + CHUNK // BLOCK))
    tokens: Any = list(range(CHUNK))
    if fields(LoadStoreOp)[0].name == "token_bytes":  # newer LMCache has them packed
        tokens = b"".join(token.to_bytes(4, "big") for token in tokens)

    def store() -> bool:
        chunk = LoadStoreOp(tokens, [blocks], 0, CHUNK)
        adapter.submit_store_request("request", chunk, adapter.create_recorded_event())
        future = adapter.store_futures.get("request")
        return future is not None and future.result(10)

    report = {"before": store()}
    adapter.transfers._server.lent.pool.fill_(7)  # pages that nobody wrote to take no room
    # With what would take its shared memory away, as where a container is killed.
    [killed] = children(server.pid)
    subprocess.run(["kill", "-KILL", *map(str, (killed, *children(killed)))], check=True)
    report["lost"] = wait_for(lambda: not adapter.is_healthy)
    report["again"] = wait_for(lambda: adapter.is_healthy)
    adapter.store_futures.clear()
    report["after"] = report["again"] and store()
    return report


if __name__ == "__main__":
    end_with(lambda: main(Path(sys.argv[1])))
