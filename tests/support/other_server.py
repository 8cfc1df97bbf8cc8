"""A server of another version of LMCache, as engines see it: it answers what names no tokens.

The key of a question is what changes between versions. A server can't read another version's, and
does not answer. It speaks LMCache's own messages over ZeroMQ, in a thread.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse
from lmcache.v1.multiprocess.protocols.server_module import (
    ServerModuleCallRequest,
    ServerModuleCallResponse,
)
from lmcache.v1.multiprocess.rpc import get_rpc_spec
from lmcache.v1.multiprocess.transport.zmq_impl.mq import msgspec_decode, msgspec_encode
from lmcache.v1.multiprocess.transport.zmq_impl.wire import decode_operation
from support.until import until

from lmcache_xpu.cache.hit_places import REGISTER

POOL = 2**20
REGISTERED = ServerModuleCallResponse(success=True, payload=b"", error="")


class OtherServer:
    """Listens while it is entered.

    Args:
        url: where.
        chunk_tokens: tokens of a chunk.
        reads_keys: whether it is of the same version after all.
    """

    def __init__(self, url: str, chunk_tokens: int = 256, *, reads_keys: bool = False) -> None:
        self.asked: list[str] = []
        self.lookups: list[int] = []  # tokens of each
        self.pings: Counter[bytes] = Counter()  # of each client
        self.reads_keys = reads_keys
        self.silent = False
        self.fetches = False  # what was looked up is on its way from a disk
        self.slow_s = 0.0  # that it takes to answer the heartbeat
        self.path = Path("/dev/shm") / f"lmcache-xpu-test-{uuid.uuid4().hex}"
        self._answers: dict[str, Any] = {
            "ping": True,
            "get_chunk_size": chunk_tokens,
            "negotiate_chunk_size": chunk_tokens,
            "get_experimental": [],
            "register_kv_cache_engine_driven_context": RegisterEngineDrivenContextResponse(
                shm_name=self.path.name, pool_size=POOL
            ),
            "unregister_kv_cache_engine_driven_context": None,
            "query_prefetch_status": 0,
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(url)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self.path.touch(mode=0o600)
        self.path.write_bytes(bytes(POOL))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()
        self.path.unlink()

    def wait_for_pings(self, clients: int) -> None:
        """Wait until so many clients have asked twice: what each asked before them has come."""
        before = Counter(self.pings)
        while sum(count >= before[name] + 2 for name, count in list(self.pings.items())) < clients:
            time.sleep(0.05)

    def wait_for_heartbeats(self, count: int) -> None:
        """Wait until so many more have come, of whatever client."""
        last = self.asked.count("ping") + count
        until(lambda: self.asked.count("ping") >= last)

    def _serve(self) -> None:
        while not self._ends.is_set():
            if not self._socket.poll(50):
                continue
            client, number, name, *payloads = self._socket.recv_multipart()
            operation = decode_operation(name)
            if operation == "server_module_call":
                operation = msgspec_decode(payloads[0], ServerModuleCallRequest).method
            self.asked.append(operation)
            self.pings[client] += operation == "ping"
            if self.silent:
                continue
            if operation == "ping":
                time.sleep(self.slow_s)
            answer: list[bytes] = []
            if operation == "lookup":
                key = msgspec_decode(payloads[0], get_rpc_spec(operation).payload_types[0])
                self.lookups.append(key.end)
                if not self.reads_keys:
                    continue
            elif operation == REGISTER:
                answer = [msgspec_encode(REGISTERED, ServerModuleCallResponse)]
            elif operation in self._answers:
                result = get_rpc_spec(operation).response_type
                is_late = self.fetches and operation == "query_prefetch_status"
                answer = [msgspec_encode(None if is_late else self._answers[operation], result)]
            else:
                continue
            self._socket.send_multipart([client, number, name, *answer])
