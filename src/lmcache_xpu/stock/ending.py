"""The end of LMCache's engine: threads, sockets, tiers and the CPU pool go with the vLLM engine.

vLLM's own connector for LMCache ends nothing. So engines that come and go in one process would each
leave a pool, the next one would get the first one's engine, and threads would keep the process.

LMCache's own shutdown has three faults. Its offload server closes a socket from which another
thread reads, at which ZeroMQ may abort the process: here that thread stays until the process ends.
Its look-up client ends the ZeroMQ context that the whole process shares: here it stays. And its CPU
pool goes before the disk tier has written from it: here it goes last.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from lmcache_xpu.stock.health import POOL

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_JOIN_S = 5.0


def end_lmcache(lmcache: Any) -> None:
    """End all that LMCache's half of one connector has started; errors of parts are logged.

    Waits for queued writes to disk, and seconds for threads.
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
    server.running = False  # its thread looks every second
    if _has_ended(server.thread):
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
    if manager is not None and _has_ended(manager.thread):
        manager.loop.close()


def _has_ended(thread: threading.Thread) -> bool:
    """Wait for a thread, for some seconds; return whether it has ended, log that it has not."""
    thread.join(_JOIN_S)
    if thread.is_alive():
        logger.warning(
            "LMCache's thread %s goes on; what it uses stays open "
            "(docs: troubleshooting#not-ended)",
            thread.name,
        )
    return not thread.is_alive()


def end_with_process(connector: Any) -> None:
    """Call `shutdown` of a connector when the main thread has ended.

    Python waits for LMCache's threads before it runs what `atexit` knows. So it is called just
    before `concurrent.futures` ends its own threads, which are needed until then.
    """
    # No public function runs before Python waits for threads.
    threading._register_atexit(_end, weakref.ref(connector))  # type: ignore[attr-defined]


def _end(connector: weakref.ref[Any]) -> None:
    try:
        if (living := connector()) is not None:
            living.shutdown()
    except Exception as error:  # others are ended all the same
        logger.exception(
            "LMCache did not end with the process: %s (docs: troubleshooting#not-ended)", error
        )
