"""LMCache's adapter of a scheduler, for which a server is there again when it answers questions."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from lmcache_xpu.metrics import LOAD_SERVER
from lmcache_xpu.mp_connector.heartbeat import Heartbeat
from lmcache_xpu.mp_connector.questions import answers
from lmcache_xpu.versions.lmcache_server import LMCacheMPSchedulerAdapter

__all__ = ["SchedulerAdapter"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# vLLM asks again with its next step, and LMCache needs two answers of the server: a request that is
# looked up beside others would lose two of their steps, 6 to 14 ms each (8B on one H100). The
# answers for 16,384 tokens in memory take 3 ms, for 65,536 nine (a 2-core VM). So a request is
# waited for in its first two steps, and all together in a step no longer than this.
PATIENCE_S = 0.004
# Where nobody else waits for a token, an idle step would follow, and the same again; or a step with
# one of several. On a slow host the look-up of each of four took 6 to 9 ms (8B on one H100).
PATIENCE_ALONE_S = 0.02  # for a request
PATIENCE_ALL_ALONE_S = 0.06  # for all in a step
# LMCache's thread sends 65,536 tokens so long (a 2-core VM), and can't while this one computes.
_SENT_S = 0.002
_STEPS = 2
_POLL_S = 0.0002


class SchedulerAdapter(LMCacheMPSchedulerAdapter):  # type: ignore[misc]  # untyped base
    """LMCache's, which asks a lost server nothing until it answers a look-up.

    Arguments are LMCache's.
    """

    _heartbeats: dict[str, Heartbeat] | None
    _is_alone = False  # the request that is looked up
    _meanwhile: Callable[[], None] | None = None
    _told = False  # that the server is lost
    _patient_until: float | None = None  # in this step, once somebody was waited for

    @functools.cached_property
    def _waits(self) -> Counter[str]:
        """In how many steps each request was waited for."""
        return Counter()

    def begin_look_up(self, *, is_alone: bool, meanwhile: Callable[[], None] | None = None) -> None:
        """Hear of a request that is about to be looked up.

        Args:
            is_alone: whether nobody else waits for a token.
            meanwhile: is called while the server looks, where this thread waits for it.
        """
        self._is_alone = is_alone
        self._meanwhile = meanwhile

    def end_step(self) -> None:
        """Hear that vLLM has decided on a step."""
        self._patient_until = None

    def _ensure_heartbeat_started(self) -> None:
        with self._heartbeat_lock:
            if self._heartbeats is None:
                self._heartbeats = {url: self._heartbeat_of(url) for url in self.req_clients}

    def _heartbeat_of(self, url: str) -> Heartbeat:
        client = self.req_clients[url]
        heartbeat = Heartbeat(
            req_client=client,
            health_event=self._health_events[url],
            interval=self._heartbeat_interval,
        )
        # Older LMCache has nothing to do when a server is there again.
        heartbeat.register_recover_callback(lambda: self._recover_server_chunk_size(url, client))
        heartbeat.start()
        return heartbeat

    def _recover_server_chunk_size(self, server_url: str, req_client: Any) -> bool:
        """Whether a server that was lost may be asked again; never raises."""
        recover = getattr(super(), "_recover_server_chunk_size", None)
        if recover is not None and not recover(server_url, req_client):
            return False
        return answers(req_client, self.model_name, self.world_size, self._mq_timeout)

    def check_lookup_result(self, request_id: str) -> Any:
        """Return the tokens of a request's hit; None while that is not clear.

        Waits a little for what is in memory, see `PATIENCE_S`. A disk takes longer.
        """
        if self.is_healthy:
            self._told = False
        else:  # the heartbeat noticed it
            self._tell()
        tokens = super().check_lookup_result(request_id)
        if tokens is not None or self._waits[request_id] == _STEPS:
            return tokens
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + (PATIENCE_ALL_ALONE_S if self._is_alone else PATIENCE_S)
        patient_until = min(self._patient_until, now + PATIENCE_ALONE_S)
        self._waits[request_id] += now < patient_until
        while tokens is None and time.monotonic() < patient_until:
            time.sleep(_POLL_S)
            if self._meanwhile is not None and time.monotonic() - now > _SENT_S:
                meanwhile, self._meanwhile = self._meanwhile, None
                meanwhile()
            tokens = super().check_lookup_result(request_id)
        return tokens

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a request's look-up."""
        self._waits.pop(request_id, None)
        super().cleanup_lookup_result(request_id)

    def _mark_lookup_timed_out(self, url: str) -> None:
        assert self._heartbeats is not None  # with the first look-up
        self._heartbeats[url].doubt()
        super()._mark_lookup_timed_out(url)
        self._tell()

    def _tell(self) -> None:
        """Count and log that requests lack the server, once until it is there again."""
        if self._told:
            return
        self._told = True
        LOAD_SERVER.failed("server")
        logger.warning(
            "LMCache's server answers no look-up: prompts are computed until it does "
            "(docs: troubleshooting#server-lost)"
        )
