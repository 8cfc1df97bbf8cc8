"""Nothing that a client sends ends the engine, which serves the others as well."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache_xpu.metrics import fallback

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ServedRequest", "guarded"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class ServedRequest:
    """A request without its `kv_transfer_params`, as LMCache gets it when it is allocated and ends.

    LMCache reads fields of disaggregated prefill there, which this package does not serve, and
    raises where one is missing or its request has ended early.

    Args:
        request: vLLM's.
    """

    kv_transfer_params = None

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@contextmanager
def guarded(hook: str) -> Iterator[None]:
    """Turn an error of one request into a miss: it is counted, and logged once for each kind.

    Args:
        hook: of vLLM, that was called.
    """
    try:
        yield
    except Exception as error:  # whatever a request's content does to who reads it
        fallback("request")
        _log(hook, type(error).__name__, str(error))


@functools.lru_cache(maxsize=256)
def _log(hook: str, kind: str, text: str) -> None:
    logger.exception(
        "a request is computed, as %s failed for it: %s: %s (docs: troubleshooting#request-failed)",
        hook,
        kind,
        text,
    )
