"""The end of LMCache's engine: threads, sockets, tiers and the CPU pool go with the vLLM engine.

vLLM's own LMCache connector ends nothing. That is enough where each engine has a process; where
several come and go in one (tests, notebooks), each left its pool, and the next one found the first
one's engine in its place. And a thread of LMCache's keeps a process for ever.

LMCache's own way has three faults: its offload server closes a socket from which another thread
reads, at which the ZeroMQ library may abort the process; its look-up client ends the ZeroMQ
context that the whole process shares, and waits for everybody else's sockets; and its CPU pool goes
before the disk tier has written from it. So here a thread ends first, then its socket is closed,
the shared context stays, as does the offload server, a thread that waits until the process ends;
and the pool goes last.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from lmcache_xpu.stock.health import POOL

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_JOIN_S = 5.0


def end_lmcache(lmcache: Any) -> None:
    """End all that one connector's LMCache has started. An error in a part is logged.

    Waits for queued writes to disk, and seconds for threads.

    Args:
        lmcache: LMCache's half of a connector, of a worker or of the scheduler.
    """
    from lmcache.integration.vllm import utils

    parts: list[tuple[str, Any, Callable[[Any], None]]] = [
        ("health monitor", lmcache._manager.health_monitor, lambda part: part.stop()),
        ("look-up server", lmcache.lookup_server, _end_lookup_server),
        ("look-up client", lmcache.lookup_client, _end_lookup_client),
        ("engine", lmcache.lmcache_engine, _end_engine),
    ]
    for name, part, end in parts:
        if part is None:
            continue
        try:
            end(part)
        except Exception as error:  # the others are ended all the same
            logger.exception(
                "LMCache's %s did not end: %s (docs: troubleshooting#not-ended)", name, error
            )
    # LMCache reads its configuration once in a process, and we complete it for an engine.
    if utils._config_instance is lmcache.config:
        utils._config_instance = None


def _end_lookup_server(server: Any) -> None:
    """Its thread asks every second whether it is to go on."""
    server.running = False
    if ended(server.thread):
        server.transport.close()
        server.transport.ctx.term()  # its own


def _end_lookup_client(client: Any) -> None:
    for socket in client.transport.sockets:
        socket.close(linger=0)


def _end_engine(engine: Any) -> None:
    from lmcache.integration.vllm.utils import ENGINE_NAME

    from lmcache_xpu.versions.lmcache import LMCacheEngineBuilder

    manager = engine.storage_manager
    if manager is not None:
        for name, tier in manager.storage_backends.items():
            if name != POOL:
                tier.close()  # once more is allowed
    if LMCacheEngineBuilder.get(ENGINE_NAME) is engine:
        LMCacheEngineBuilder.destroy(ENGINE_NAME)
    if manager is not None and ended(manager.thread):
        manager.loop.close()


def ended(thread: threading.Thread) -> bool:
    """Wait for a thread; whether it has ended. That it goes on is logged."""
    thread.join(_JOIN_S)
    if thread.is_alive():
        logger.warning(
            "LMCache's thread %s goes on; what it uses stays open "
            "(docs: troubleshooting#not-ended)",
            thread.name,
        )
    return not thread.is_alive()


class Ending(Protocol):
    """What must be ended before the process can end."""

    def shutdown(self) -> None:
        """End it; may be called again."""


_open: weakref.WeakSet[Ending] = weakref.WeakSet()
_registered = False


def end_with_process(ending: Ending) -> None:
    """End it when the main thread has ended, if nobody has ended it before.

    Python waits for LMCache's threads before it runs what `atexit` knows. So this is called
    where `concurrent.futures` ends its own threads, and before that: they are needed to the end.
    """
    global _registered
    _open.add(ending)
    if not _registered:
        _registered = True
        threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # no public way


def _end_all() -> None:
    for ending in list(_open):
        try:
            ending.shutdown()
        except Exception as error:  # the others are ended all the same
            logger.exception(
                "LMCache did not end with the process: %s (docs: troubleshooting#not-ended)", error
            )
