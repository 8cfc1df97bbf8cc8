"""A failure that others would wait for ends its process: of a start, and of a step of one rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_xpu.kv_connector.orphans import end_soon, is_child

__all__ = ["ending_on_failure", "ending_rank_on_failure"]

ANSWER_S = 1.0  # for vLLM to log the error, and to answer


@contextmanager
def ending_on_failure() -> Iterator[None]:
    """Let the process end if this fails.

    LMCache's threads would keep it, and vLLM would wait for it for ever. Its own way to stop them
    may abort the process before the error is logged (see `LMCacheXPUConnector.shutdown`), so the
    process ends when its main thread has: by then vLLM has said why. A main thread may wait for
    ever as well, for workers that wait for each other; a process of vLLM's own ends all the same.
    """
    try:
        yield
    except BaseException:
        threading.Thread(target=_end_with_main_thread, daemon=True).start()
        if is_child():
            end_soon()
        raise


@contextmanager
def ending_rank_on_failure(ranks: int) -> Iterator[None]:
    """Let the process end if a step fails on one of several ranks.

    The other ranks wait for this one in a collective operation, for half an hour by default, and
    vLLM for the answer of the first rank alone. That a process has ended it hears at once, and then
    ends the engine.

    Args:
        ranks: workers of the engine.
    """
    try:
        yield
    except Exception:
        if ranks > 1 and is_child():
            threading.Timer(ANSWER_S, os._exit, (1,)).start()
        raise


def _end_with_main_thread() -> None:
    threading.main_thread().join()
    os._exit(1)
