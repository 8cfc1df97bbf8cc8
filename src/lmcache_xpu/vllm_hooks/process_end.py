"""The end of a process that nobody has a use for: its parent has ended, or its start has failed.

A worker learns of its parent's end in a thread, and its main thread looks when it has a moment. It
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
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

END_S = 12.0  # that vLLM and LMCache have to end by themselves
_POLL_S = 1.0
_watched = threading.Event()


def end_with_parent() -> None:
    """From now on, end this process when its parent has ended; may be called again.

    Does nothing in a process that vLLM has not started: a user's script may outlive its shell.
    """
    if multiprocessing.parent_process() is not None and not _watched.is_set():
        _watched.set()
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


@contextmanager
def ending_on_failure() -> Iterator[None]:
    """End the process if this fails: LMCache's threads would keep it, and vLLM wait for it.

    LMCache's own shutdown may abort the process before the error is logged (see `stock.ending`), so
    the process ends when its main thread has: by then vLLM has logged it. A process that vLLM has
    started ends soon all the same, as its main thread may wait for other workers for ever.
    """
    try:
        yield
    except BaseException:
        threading.Thread(target=_end_with_main_thread, daemon=True).start()
        if multiprocessing.parent_process() is not None:  # vLLM has started this one
            _end_soon()
        raise


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    logger.error(
        "The process %d, which started this one, has ended; this one ends within %.0f s "
        "(docs: troubleshooting#ended-alone)",
        parent,
        END_S,
    )
    _end_soon()


def _end_soon() -> None:
    """End this process in `END_S` seconds, whatever it waits for; its log says where it did."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__)


def _end_with_main_thread() -> None:
    threading.main_thread().join()
    os._exit(1)
