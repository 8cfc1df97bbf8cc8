"""LMCache's offload server of one worker, which ends when it is told to."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import zmq

from lmcache_xpu.cache_engine.ending import ended
from lmcache_xpu.versions.lmcache import OffloadMsg, ZMQOffloadServer, get_zmq_rpc_path_lmcache

__all__ = ["OffloadServer"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_WAKE_MS = 1000


class OffloadServer(ZMQOffloadServer):  # type: ignore[misc]  # untyped base
    """LMCache's server, whose own way to end closes a socket from which its thread reads.

    Args:
        engine: LMCache's.
        rank: of the worker in its tensor parallel group.
    """

    def __init__(self, engine: Any, rank: int) -> None:
        self._rank = rank
        super().__init__(engine, rank)

    def offload(self, hashes: list[int], slot_mapping: list[int], offsets: list[int]) -> bool:
        """Store what a message names; nothing for an empty one, which only wakes the thread."""
        return not hashes or bool(super().offload(hashes, slot_mapping, offsets))

    def close(self) -> None:
        """End the thread, which waits for a message, and then its socket."""
        self.running = False
        if not self.thread.is_alive():
            return
        port = int(os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", 100))
        engine = self.lmcache_engine.metadata.engine_id or "default"
        with self.ctx.socket(zmq.REQ) as bell:
            bell.setsockopt(zmq.LINGER, 0)
            bell.setsockopt(zmq.RCVTIMEO, _WAKE_MS)
            bell.connect(f"ipc://{get_zmq_rpc_path_lmcache(engine, 'offload', port, self._rank)}")
            bell.send(msgspec.msgpack.encode(OffloadMsg(hashes=[], slot_mapping=[], offsets=[])))
            try:
                bell.recv()
            except zmq.Again:
                logger.debug("LMCache's offload server did not answer")
        if ended(self.thread):
            self.socket.close(linger=0)
