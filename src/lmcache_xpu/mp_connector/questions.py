"""Whether LMCache's server answers what requests ask, and not its heartbeat alone.

A server of another version answers LMCache's heartbeat. It can't read the keys of questions, and is
silent. LMCache takes it for healthy again after each of them, and lets the next request wait. So a
lost server is asked as requests ask, for a prompt of no tokens. The heartbeat's thread waits.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from lmcache_xpu.versions.lmcache_server import IPCCacheServerKey

__all__ = ["answers"]


def answers(client: Any, model_name: str, world_size: int, timeout_s: float) -> bool:
    """Whether a server answers a look-up, of which it keeps nothing; waits for it.

    Args:
        client: LMCache's, of the server.
        model_name: as look-ups name it.
        world_size: as look-ups name it.
        timeout_s: for the whole answer.
    """
    deadline = time.monotonic() + timeout_s
    name = f"lmcache-xpu-{uuid.uuid4().hex}"
    key = IPCCacheServerKey.from_token_ids(model_name, world_size, None, [], request_id=name)
    if not client.lookup(key, world_size).wait(timeout_s):
        return False
    status = client.query_prefetch_status(name)
    return bool(status.wait(max(0.0, deadline - time.monotonic())))
