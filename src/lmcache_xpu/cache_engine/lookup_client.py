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
from lmcache_xpu.cache_engine.lookup_server import answer_of, parts_of
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

    def far_tokens(self, lookup_id: str) -> int:
        """Return how many tokens that a look-up has promised are not in this host's memory.

        Args:
            lookup_id: its name. Of several workers the one counts that has the most.
        """
        tokens: int = self.transport.far_tokens.get(lookup_id, 0)
        return tokens

    def clear_lookup_status(self, lookup_id: str) -> None:
        """Forget what a look-up has promised."""
        super().clear_lookup_status(lookup_id)
        self.transport.far_tokens.pop(lookup_id, None)


class NearTransport(RpcClientTransport):  # type: ignore[misc]  # untyped base
    """LMCache's transport of look-ups, and a call where the worker is in this process.

    Args:
        stock: LMCache's transport, for workers elsewhere.

    Attributes:
        far_tokens: by name of a look-up, tokens that are not in this host's memory.
    """

    def __init__(self, stock: RpcClientTransport) -> None:
        self.stock = stock
        self.engine: Callable[[], CacheEngine | None] = _none
        self.far_tokens: dict[str, int] = {}

    @property
    def world_size(self) -> int:
        """Number of workers that are asked."""
        size: int = self.stock.world_size
        return size

    def send_and_recv_all(self, msg: list[Any]) -> list[bytes]:
        """Return LMCache's part of each worker's answer; none after an error, which is a miss.

        Args:
            msg: hashes and sizes of chunks, the request's name, and its options as JSON.
        """
        engine = self.engine() if self.world_size == 1 else None
        answers = self.stock.send_and_recv_all(msg) if engine is None else self._call(engine, msg)
        parts = [parts_of(answer) for answer in answers]
        self.far_tokens[msg[2]] = max((far for _, far in parts), default=0)
        return [tokens for tokens, _ in parts]

    def _call(self, engine: CacheEngine, msg: list[Any]) -> list[bytes]:
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
        return [answer_of(tokens, engine.far_tokens(request))]

    def close(self) -> None:
        """Close LMCache's transport."""
        self.stock.close()


def _none() -> None:
    """Return no engine: nobody has said where it is."""
