"""The connection of one half of the connector to LMCache's server, and whether the server answers.

A heartbeat says only that a server runs: one of another version answers it, but can't read keys,
and is silent when it is asked for chunks. So a server that was lost is asked as requests ask.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from lmcache_xpu.cache.hit_places import ALIGN
from lmcache_xpu.cache.lookups import LookUps
from lmcache_xpu.cache.protocol import CachePlaces, KeyScope, TokenRange
from lmcache_xpu.cache.server_places import ServerPlaces
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_SERVER, STORE_SERVER
from lmcache_xpu.versions import lmcache_server

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only
ALIGN_S = 1.0  # a server without any module is silent
START_S = 10.0  # for the first answer to a look-up
# Intervals without a heartbeat, of a process that was stopped, after which this worker registers
# again. A server forgets a worker that was silent for longer, and answers its pings as before:
# LMCache's `--worker-reap-timeout-seconds` is to be no less.
SILENT_BEATS = 3


class ServerClient:
    """Asks one server, and knows whether it answers; see `Cache`.

    Raises SettingsError if the server does not answer, or its chunks are no multiple.
    """

    local = None  # the cache is not in this process
    load_flow, store_flow = LOAD_SERVER, STORE_SERVER

    def __init__(
        self,
        url: str,
        scope: KeyScope,
        timeout_s: float,
        alignment: int,  # tokens of which a chunk has to be a multiple
        # Of a worker, whose memory the server gives back when heartbeats end.
        instance_id: int | None = None,
    ) -> None:
        self.scope, self.timeout_s, self.instance_id = scope, timeout_s, instance_id
        self.healthy = threading.Event()
        self.healthy.set()
        self._alignment = alignment
        self._is_closed = False
        self._ends = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self.requests: Any = RequestClientFactory.create(url)
        try:
            self.chunk_tokens: int = self._asked_chunk_tokens()
        except TimeoutError:
            self.requests.close()
            raise SettingsError(
                f"a server at {url} that is none of LMCache's, or hangs",
                f"one that answers within {timeout_s:.1f} s",
                "Start it anew, or leave server_url unset and `lmcache-xpu serve` does.",
            ) from None
        if self.chunk_tokens % alignment:
            self.requests.close()
            raise SettingsError(
                f"an LMCache server with chunks of {self.chunk_tokens} tokens",
                f"a multiple of {alignment} tokens, vLLM's blocks",
                f"Start the server with --chunk-size {alignment}, or a multiple of it.",
            )

    def key(self, tokens: TokenRange, *, worker: bool) -> Any:
        """Return LMCache's key of a range of tokens."""
        return lmcache_server.make_key(
            tokens.tokens,
            model_name=self.scope.model_name,
            world_size=self.scope.world_size,
            worker_id=self.scope.worker_id if worker else None,
            start=tokens.start,
            end=tokens.end,
            request_id=tokens.request_id,
            cache_salt=tokens.salt,
            request_configs=tokens.options,
            num_kv_readers=self.scope.readers,
        )

    def lookups(self, policy: object) -> LookUps:
        """Return the look-ups of a scheduler; the server itself reads its other tiers."""
        return LookUps(self)

    def places(self, sizes: Sequence[int], windows: Sequence[int], timeout_s: float) -> CachePlaces:
        """Return how the server is asked; waits until it knows this worker."""
        assert self.instance_id is not None  # of a worker
        places = ServerPlaces(self.requests, self.instance_id, sizes, windows)
        places.begin(self.scope, timeout_s)
        if not self._answers_lookups(START_S):
            raise SettingsError(
                f"an LMCache server that answered no look-up within {START_S:.0f} s",
                "one of the engine's LMCache",
                "A server of another version can't read them: install one version on both sides.",
            )
        return places

    def _answers_lookups(self, timeout_s: float) -> bool:
        """Whether the server answers a look-up, of which it keeps nothing; waits for it."""
        deadline = time.monotonic() + timeout_s
        name = f"lmcache-xpu-{uuid.uuid4().hex}"
        key = self.key(TokenRange(name, lmcache_server.key_tokens(()), 0, 0), worker=False)
        if not self.requests.lookup(key, self.scope.tensor_parallel).wait(timeout_s):
            return False
        status = self.requests.query_prefetch_status(name)
        return bool(status.wait(max(0.0, deadline - time.monotonic())))

    def start_heartbeat(
        self,
        interval_s: float,
        recovered: Callable[[], bool] = lambda: True,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Ping the server from now on, in a thread."""
        self._heartbeat = threading.Thread(
            target=self._beat,
            args=(interval_s, recovered, lost),
            name="lmcache-xpu-heartbeat",
            daemon=True,
        )
        self._heartbeat.start()

    def stop_heartbeat(self) -> None:
        """Ping no more, and wait for a ping that has begun."""
        self._ends.set()
        if self._heartbeat is not None:
            self._heartbeat.join()

    def close(self) -> None:
        """End the connection; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self.stop_heartbeat()
            self.requests.close()

    def _asked_chunk_tokens(self) -> int:
        asked = lmcache_server.chunk_tokens(self.requests, self._alignment)
        tokens = int(asked.result(timeout=self.timeout_s))
        if tokens % self._alignment:  # LMCache can't round them up: a server with our module can
            request = ServerModuleCallRequest(ALIGN, str(self._alignment).encode())
            rounded = self.requests.server_module_call(request)
            if rounded.wait(min(self.timeout_s, ALIGN_S)) and rounded.result(timeout=0).success:
                tokens = int(rounded.result(timeout=0).payload)
        return tokens

    def _beat(
        self, interval_s: float, recovered: Callable[[], bool], lost: Callable[[], None]
    ) -> None:
        last = time.monotonic()
        while not self._ends.wait(interval_s):
            if time.monotonic() - last > SILENT_BEATS * interval_s:
                self.healthy.clear()
            was_healthy = self.healthy.is_set()
            try:
                answered = bool(self.requests.ping(self.instance_id).result(timeout=interval_s))
                if answered and not was_healthy and not self._ends.is_set():
                    answered = self._may_be_used() and recovered()
            except Exception:  # of LMCache's transport: it names none
                answered = False
            if self._ends.is_set():
                return
            last = time.monotonic()
            if not answered:
                self.healthy.clear()
                lost()
            elif not was_healthy:  # else somebody may have missed an answer meanwhile
                logger.warning("LMCache's server answers again (docs: troubleshooting#server-lost)")
                self.healthy.set()

    def _may_be_used(self) -> bool:
        if not self._answers_lookups(self.timeout_s):
            return False
        if (tokens := self._asked_chunk_tokens()) == self.chunk_tokens:
            return True
        logger.error(
            "LMCache's server came back with chunks of %d tokens instead of %d: it is not used "
            "(docs: troubleshooting#server-lost)",
            tokens,
            self.chunk_tokens,
        )
        return False
