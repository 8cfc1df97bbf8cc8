"""A start that fails ends its process, for which others would wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_xpu.vllm_hooks.orphans import end_soon, is_child

__all__ = ["ending_on_failure"]


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


def _end_with_main_thread() -> None:
    threading.main_thread().join()
    os._exit(1)
