"""What has to happen when transfers are done: a thread that waits for them, one after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lmcache_xpu.transfer.devices import TransferHandle

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

POLL_S = 5e-4


class Finisher:
    """Calls actions when the transfers that they wait for are done, in the order they were given.

    An action that raises is logged, and the next one goes on. The thread starts with the first
    action that has to wait.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lmcache-xpu-finish")

    def when_done(self, handles: Sequence[TransferHandle], action: Callable[[], None]) -> None:
        """Call `action` here if all transfers are done; else later, from the thread."""
        if all(handle.done.reached() for handle in handles):
            action()
        else:
            self._thread.submit(_wait_and_call, handles, action)

    def drain(self) -> None:
        """Wait until all actions have been called."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until all actions have been called, and end the thread. May be called again."""
        self._thread.shutdown()


def _wait_and_call(handles: Sequence[TransferHandle], action: Callable[[], None]) -> None:
    try:
        for handle in handles:
            # Not synchronize(): beside it, another thread's launches took several times as long.
            while not handle.done.reached():
                time.sleep(POLL_S)
        with torch.inference_mode():
            action()
    except Exception:  # whatever it is: this thread has the next transfers to finish
        logger.exception(
            "lmcache-xpu could not finish a transfer (docs: troubleshooting#transfer-not-finished)"
        )
