"""LMCache's look-ups of one scheduler, with keys of their own for salted requests.

LMCache's scheduler asks its workers through sockets, and a thread of each answers. Where the one
worker is in the scheduler's process, it is asked by a call: two changes of threads and two
encodings for each request would be made while the device waits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_xpu.cache_engine.chunk_names import ChunkNames
from lmcache_xpu.versions.lmcache import LMCacheLookupClient, RpcClientTransport

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.cache_salt import CacheSalts
    from lmcache_xpu.cache_engine.engine import CacheEngine

__all__ = ["LookupClient"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class LookupClient(LMCacheLookupClient):  # type: ignore[misc]  # untyped base
    """Asks the workers how many tokens of a prompt can be loaded.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's description of vLLM's engine.
        transport: LMCache's, to the workers.
        block_tokens: tokens of a block that vLLM hashes.
    """

    salts: CacheSalts | None = None  # of the scheduler's requests

    def __init__(
        self, config: Any, metadata: Any, transport: RpcClientTransport, block_tokens: int
    ) -> None:
        super().__init__(config, metadata, NearTransport(transport))
        self.token_database = ChunkNames(config, metadata, block_tokens)

    def ask_near(self, engine: Callable[[], CacheEngine | None]) -> None:
        """Ask the one worker by a call from now on, while it is in this process.

        Args:
            engine: returns LMCache's engine of that worker, if it is here and answers from its own
                memory: LMCache's transport gives up a look-up that takes seconds.
        """
        self.transport.engine = engine

    def lookup(
        self,
        token_ids: Sequence[int],
        lookup_id: str,
        request_configs: dict[str, Any] | None = None,
    ) -> int | None:
        """Return the number of tokens that can be loaded, of a prefix of these.

        Args:
            token_ids: of the request.
            lookup_id: its name.
            request_configs: LMCache's options of the request.
        """
        request, salt = None, ""
        if self.salts is not None:
            if self.salts.computes(lookup_id):
                return 0
            token_ids = self.salts.look_up(lookup_id, token_ids)
            request, salt = self.salts.admitted(lookup_id), self.salts.salt(lookup_id)
        with self.token_database.remember(request, salt):
            count: int | None = super().lookup(token_ids, lookup_id, request_configs)
        return count


class NearTransport(RpcClientTransport):  # type: ignore[misc]  # untyped base
    """LMCache's transport of look-ups, and a call where the worker is in this process.

    Args:
        far: LMCache's transport, for workers elsewhere.
    """

    def __init__(self, far: RpcClientTransport) -> None:
        self.far = far
        self.engine: Callable[[], CacheEngine | None] = _none

    @property
    def world_size(self) -> int:
        """Number of workers that are asked."""
        size: int = self.far.world_size
        return size

    def send_and_recv_all(self, msg: list[Any]) -> list[bytes]:
        """Return the answer of each worker; none after an error, which counts as a miss.

        Args:
            msg: hashes and sizes of chunks, the request's name, and its options as JSON.
        """
        engine = self.engine() if self.world_size == 1 else None
        if engine is None:
            answers: list[bytes] = self.far.send_and_recv_all(msg)
            return answers
        hashes, sizes, request, options = msg
        try:
            tokens = engine.lookup(
                hashes=hashes,
                offsets=sizes,
                lookup_id=request,
                pin=True,
                request_configs=json.loads(options) if options else None,
            )
        except Exception as error:  # LMCache's own server logs and goes on, too
            logger.exception(
                "A look-up failed, and counts as a miss: %s (docs: troubleshooting#lookup-failed)",
                error,
            )
            return []
        return [tokens.to_bytes(4, "big")]

    def close(self) -> None:
        """Close LMCache's transport."""
        self.far.close()


def _none() -> None:
    """Return no engine: nobody has said where it is."""
