"""LMCache's look-up server of one worker, whose answers also tell what is not in memory.

A scheduler needs that to choose whether a request waits for its load, see
`kv_connector.load_policy`. LMCache's answer is a number of tokens in 4 bytes; another one follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_xpu.versions.lmcache import RpcServerTransport

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.engine import CacheEngine

__all__ = ["AnsweringTransport", "answer_of", "parts_of"]

_NUMBER_BYTES = 4  # as LMCache has them


def answer_of(tokens: int, far_tokens: int) -> bytes:
    """Return a worker's answer to a look-up.

    Args:
        tokens: that can be loaded.
        far_tokens: tokens among them that are not in this host's memory.
    """
    return b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in (tokens, far_tokens))


def parts_of(answer: bytes) -> tuple[bytes, int]:
    """Return LMCache's part of an answer, and the number of tokens that are not in memory."""
    return answer[:_NUMBER_BYTES], int.from_bytes(answer[_NUMBER_BYTES:], "big")


class AnsweringTransport(RpcServerTransport):  # type: ignore[misc]  # untyped base
    """LMCache's transport of a look-up server, which completes its answers.

    Called by the server's thread, which answers one look-up before it takes the next.

    Args:
        stock: LMCache's.
        engine: LMCache's, which is looked into.
    """

    def __init__(self, stock: RpcServerTransport, engine: CacheEngine) -> None:
        self.stock = stock
        self._engine = engine
        self._request = ""

    def recv_request(self) -> tuple[bytes, list[Any]] | None:
        """Return who asks and what, with the request's name as the last but one; None if nobody."""
        received: tuple[bytes, list[Any]] | None = self.stock.recv_request()
        if received is not None:
            self._request = received[1][-2]
        return received

    def send_response(self, identity: bytes, response: bytes) -> None:
        """Send an answer of LMCache's, completed."""
        tokens, far_tokens = int.from_bytes(response, "big"), self._engine.far_tokens(self._request)
        self.stock.send_response(identity, answer_of(tokens, far_tokens))

    def close(self) -> None:
        """Close LMCache's transport."""
        self.stock.close()
