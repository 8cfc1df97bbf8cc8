"""A client of the connector, at a server that a test has in its hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_xpu.cache.protocol import KeyScope
from lmcache_xpu.cache.server_client import ServerClient

WAIT_S, BEAT_S = 0.3, 0.5
SCOPE = KeyScope("model", 1, 0, 1, True, 1)


@contextmanager
def client_at(
    url: str, block_tokens: int, *, instance_id: int | None = None, wait_s: float = WAIT_S
) -> Iterator[ServerClient]:
    """Make the client of an engine with one rank, which is closed behind the block.

    Args:
        url: of the server.
        block_tokens: tokens of a block of the engine.
        instance_id: of a worker; None of a scheduler.
        wait_s: seconds that the server has for an answer.
    """
    client = ServerClient(url, SCOPE, wait_s, block_tokens, instance_id)
    try:
        yield client
    finally:
        client.close()
