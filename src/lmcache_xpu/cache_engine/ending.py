"""The end of LMCache's engine: threads, sockets, tiers and the CPU pool go with the vLLM engine.

vLLM's own LMCache connector ends nothing. That is enough where each engine has a process; where
several come and go in one (tests, notebooks), each left its pool, and the next one found the first
one's engine in its place. And a thread of LMCache's keeps a process for ever.

LMCache's own way has two faults: its offload server closes a socket from which another thread
reads, at which the ZeroMQ library may abort the process; and its look-up client ends the ZeroMQ
context that the whole process shares, and waits for everybody else's sockets. So here a thread ends
first, then its socket is closed, and the shared context stays.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_JOIN_S = 5.0
_WAKE_MS = 1000


def end_lmcache(adapter: Any) -> None:
    """End all that one connector's LMCache has started. An error in a part is logged.

    Waits for queued writes to disk, and seconds for threads.

    Args:
        adapter: LMCache's connector for vLLM, of a worker or of the scheduler.
    """
    from lmcache.integration.vllm import utils

    manager = adapter._manager
    parts: list[tuple[str, Any, Callable[[Any], None]]] = [
        ("health monitor", manager._health_monitor, lambda part: part.stop()),
        ("plug-ins", manager._runtime_plugin_launcher, lambda part: part.stop_plugins()),
        ("internal API", manager._api_server, lambda part: part.stop()),
        ("offload server", manager._offload_server, _end_offload_server),
        ("look-up server", manager._lookup_server, _end_lookup_server),
        ("look-up client", manager._lookup_client, _end_lookup_client),
        ("engine", manager._lmcache_engine, _end_engine),
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
    if utils._config_instance is manager._config:
        utils._config_instance = None


def _end_offload_server(server: Any) -> None:
    """Its thread waits for a message, so it gets one, which asks for nothing."""
    import msgspec
    import zmq
    from lmcache.v1.offload_server.message import OffloadMsg
    from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    server.running = False
    if not server.thread.is_alive():
        return
    server.offload = lambda *message: True
    port = int(os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", 100))
    engine = server.lmcache_engine.metadata.engine_id or "default"
    rank = get_tensor_model_parallel_rank()
    with server.ctx.socket(zmq.REQ) as bell:
        bell.setsockopt(zmq.LINGER, 0)
        bell.setsockopt(zmq.RCVTIMEO, _WAKE_MS)
        bell.connect(f"ipc://{get_zmq_rpc_path_lmcache(engine, 'offload', port, rank)}")
        bell.send(msgspec.msgpack.encode(OffloadMsg(hashes=[], slot_mapping=[], offsets=[])))
        try:
            bell.recv()
        except zmq.Again:
            logger.debug("LMCache's offload server did not answer")
    if _ended(server.thread):
        server.socket.close(linger=0)


def _end_lookup_server(server: Any) -> None:
    """Its thread asks every second whether it is to go on."""
    if not hasattr(server, "transport"):
        return  # that of asynchronous loading, which waits for messages for ever, in a daemon
    server.running = False
    if _ended(server.thread):
        server.transport.close()
        server.transport.ctx.term()  # its own


def _end_lookup_client(client: Any) -> None:
    for socket in client.transport.sockets:
        socket.close(linger=0)


def _end_engine(engine: Any) -> None:
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    for name, instance in list(LMCacheEngineBuilder._instances.items()):
        if instance is engine:
            LMCacheEngineBuilder.destroy(name)
    if (manager := engine.storage_manager) is not None and _ended(manager.thread):
        manager.loop.close()


def _ended(thread: threading.Thread) -> bool:
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
