"""Nothing that a client sends ends the engine, which serves the others as well."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_xpu.metrics import fallback

__all__ = ["guarded"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


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
