"""A server that is killed where `/dev/shm` has room for its memory once, and started again.

Run by engine/test_server_memory.py with DIRECTORY, where `/dev/shm` is its own and small. A worker
without an engine maps the memory meanwhile. Prints a JSON object last.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.cache_server import CacheServer
from support.lending import BLOCK, filled, succeeds
from support.probes import end_with
from support.server_clients import client_at

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.server_client import ServerClient
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.model.kv_cache_groups import CacheGroup
from lmcache_xpu.versions.lmcache_server import key_tokens

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
        with client_at(server.url, BLOCK, instance_id=1, wait_s=1.0) as client:
            return look(server, client)
    finally:
        server.end()


def look(server: CacheServer, client: ServerClient) -> dict[str, Any]:
    caches = {"layer": filled(1, blocks=BLOCKS)}
    group = CacheGroup(number=0, layers=("layer",), block_tokens=BLOCK)
    copies = [GroupCopies(group, caches, BLOCKS, CHUNK)]
    transfers = Transfers(client, copies, timeout_s=1.0, layers=())
    transfers.register()
    client.start_heartbeat(1.0, transfers.register_again, transfers.give_back_gone)
    blocks = list(range(1, 1 + CHUNK // BLOCK))
    chunk = TokenRange("request", key_tokens(range(CHUNK)), 0, CHUNK, blocks=[blocks])

    def store() -> bool:
        return succeeds(transfers.store(chunk, transfers.event(), ()))

    report = {"before": store()}
    transfers._server.lent.pool.fill_(7)  # pages that nobody wrote to take no room
    # With what would take its shared memory away, as where a container is killed.
    [killed] = children(server.pid)
    subprocess.run(["kill", "-KILL", *map(str, (killed, *children(killed)))], check=True)
    report["lost"] = wait_for(lambda: not client.healthy.is_set())
    report["again"] = wait_for(client.healthy.is_set)
    report["after"] = report["again"] and store()
    client.stop_heartbeat()
    transfers.close()
    return report


if __name__ == "__main__":
    end_with(lambda: main(Path(sys.argv[1])))
