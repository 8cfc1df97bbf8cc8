"""A process that vLLM started ends soon after the one that started it.

A worker hears of its parent's end in a thread, and its main thread looks when it has a moment. It
has none while it waits for another rank that has ended too: such workers ran on for hours. The
limit is kept by a thread of C, which waits for nobody.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import time

__all__ = ["end_soon", "end_with_parent", "is_child"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

END_S = 12.0  # that vLLM and LMCache have to end by themselves
_POLL_S = 1.0
_watched = threading.Event()


def is_child() -> bool:
    """Whether vLLM started this process, so that nobody else has a use for it."""
    return multiprocessing.parent_process() is not None


def end_with_parent() -> None:
    """From now on, end this process when its parent has ended; may be called again.

    Does nothing in a process that is not vLLM's own: a user's script may outlive the shell that
    started it.
    """
    if is_child() and not _watched.is_set():
        _watched.set()
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def end_soon() -> None:
    """End this process in `END_S` seconds, whatever it waits for; its log says where it did."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    logger.error(
        "The process %d, which started this one, has ended; this one ends within %.0f s "
        "(docs: troubleshooting#ended-alone)",
        parent,
        END_S,
    )
    end_soon()
