"""The adapters of an engine's two halves, alone, at a server that a test has in its hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy

WAIT_S, BEAT_S = 0.3, 0.5


@contextmanager
def adapter_at(
    url: str | list[str],
    kind: Any,
    block_tokens: int,
    *,
    wait_s: float = WAIT_S,
    beat_s: float = BEAT_S,
) -> Iterator[Any]:
    """Make the adapter of an engine with one rank, which is shut down behind the block.

    Args:
        url: of the server, as this kind takes it.
        kind: class of the adapter.
        block_tokens: tokens of a block of the engine.
        wait_s: that the server has for an answer.
        beat_s: between two heartbeats.
    """
    parallel = ParallelStrategy(False, 1, 0, 1, 1, 1)
    options = {"lmcache.mp.mq_timeout": wait_s, "lmcache.mp.heartbeat_interval": beat_s}
    context = zmq.Context.instance()
    adapter = kind(url, context, "model", block_tokens, parallel, extra_config=options)
    try:
        yield adapter
    finally:
        adapter.shutdown()
