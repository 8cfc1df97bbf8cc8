"""Look-ups by a call where vLLM's scheduler and its worker share a process (one device).

LMCache's scheduler asks its worker through a socket, and a thread answers. In one process that
is two changes of threads and two encodings for each request, while the device has nothing to do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["NearLookups"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class NearLookups:
    """Takes the place of the transport of LMCache's look-up client, with the same calls.

    Args:
        far: LMCache's transport, for workers elsewhere.
        worker: finds LMCache's engine of the one worker, if that is in this process and answers
            from its own memory: LMCache's transport gives up a look-up that takes seconds.
    """

    def __init__(self, far: Any, worker: Callable[[], Any]) -> None:
        self.far = far
        self._worker = worker

    @property
    def world_size(self) -> int:
        """Workers that are asked."""
        size: int = self.far.world_size
        return size

    def send_and_recv_all(self, message: list[Any]) -> list[bytes]:
        """What each worker found, or nothing after an error, as LMCache's transport says it.

        Args:
            message: hashes and sizes of chunks, the request's name, and its options as JSON.
        """
        engine = self._worker()
        if engine is None:
            found: list[bytes] = self.far.send_and_recv_all(message)
            return found
        hashes, sizes, request, options = message
        try:
            tokens = engine.lookup(
                hashes=hashes,
                offsets=sizes,
                lookup_id=request,
                pin=True,
                request_configs=json.loads(options) if options else None,
            )
        except Exception as error:  # LMCache's own server logs and goes on, too
            logger.exception("A look-up failed, and counts as a miss: %s", error)
            return []
        return [tokens.to_bytes(4, "big")]

    def close(self) -> None:
        """Close LMCache's transport."""
        self.far.close()
