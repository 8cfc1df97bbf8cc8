"""LMCache's adapter of a worker, whose transfers run beside the engine and outlive their server.

LMCache's own lets go of all transfers when the server is lost, while they may still be copying: the
engine would give their blocks to others. Here it waits for what copies; nothing else is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.heartbeat import Heartbeat
from lmcache_xpu.mp_connector.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.mp_connector.questions import answers
from lmcache_xpu.mp_connector.step import Step
from lmcache_xpu.mp_connector.step_loads import StepLoads
from lmcache_xpu.mp_connector.transfer_context import ServerTransfers
from lmcache_xpu.versions import lmcache_server
from lmcache_xpu.versions.lmcache_server import LMCacheMPWorkerAdapter

__all__ = ["WorkerAdapter"]

START_S = 10.0  # for the first answer to a look-up


class WorkerAdapter(LMCacheMPWorkerAdapter):  # type: ignore[misc]  # untyped base
    """LMCache's, with `ServerTransfers`. Arguments are LMCache's."""

    transfers: ServerTransfers | None = None
    _heartbeat: Heartbeat | None
    _begun: Step | None = None  # by `begin_early`

    def register(
        self,
        kv_caches: dict[str, Any],
        groups: Sequence[GroupCopies],
        timeout_s: float,
        draft_layers: int,
    ) -> None:
        """Tell the server of the engine's KV cache; see `ServerTransfers`.

        Raises:
            ConnectionError: the server does not answer.
            SettingsError: it lends no memory, or answers no look-up.
        """
        self.transfers = ServerTransfers(
            self.instance_id,
            self.req_client,
            self._health_event,
            groups,
            self.lmcache_tokens_per_chunk,
            timeout_s,
            draft_layers,
        )
        self.register_kv_caches(kv_caches, (), {})
        if not self._answers(START_S):
            raise SettingsError(
                f"an LMCache server that answered no look-up within {START_S:.0f} s",
                "one of the engine's LMCache",
                "A server of another version can't read them: install one version on both sides.",
            )

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers, or a transfer has not ended yet.

        What is submitted meanwhile ends at once. LMCache forgets its transfers when this is False.
        """
        busy = self.transfers is not None and self.transfers.busy
        return bool(super().is_healthy) or busy

    def begin_early(self, step: Step) -> None:
        """Begin a step that vLLM has just decided on; `begin_step` has to follow."""
        self._ask_for(step)
        if (in_steps := self.in_steps) is not None:
            in_steps.begin_answered(step.tokens, scheduling=True)
        self._begun = step

    def begin_step(self, step: Step) -> None:
        """Begin a step: loads inside it begin where the server has answered already.

        Args:
            step: what the scheduler says of it.
        """
        if self._begun is not step:
            self._ask_for(step)
        self._begun = None
        if (in_steps := self.in_steps) is not None:
            in_steps.begin_answered(step.tokens)

    def _ask_for(self, step: Step) -> None:
        self.leave(step.written)
        for request_id, unfilled in step.unserved.waiting.items():
            failed = lmcache_server.MessagingFuture()
            failed.set_result(False)
            self.retrieve_futures[request_id] = failed, list(unfilled)
        if (in_steps := self.in_steps) is None:
            return
        in_steps.begin_step(step.written)
        in_steps.fail(step.unserved.blocks)
        if step.loads:
            self._ensure_heartbeat_started()
        for load in step.loads:
            op = load.op
            [blocks] = self._block_ids_per_group(op)
            has = op.skip_first_n_tokens // in_steps.block_tokens
            key = functools.partial(self._key, load)
            in_steps.ask(load.request_id, key, [NULL_BLOCK] * has + blocks[has:])
        in_steps.early.end()

    @property
    def in_steps(self) -> StepLoads | None:
        """The loads of a worker that are inside steps."""
        return None if self.transfers is None else self.transfers.in_steps

    def name_early(self, request_id: str, describe: Callable[[], Any]) -> None:
        """Name a request's chunks while the server looks it up; see `EarlyQuestions.name`.

        Args:
            request_id: name of the request.
            describe: makes LMCache's description of a load of its whole prompt.
        """
        if (in_steps := self.in_steps) is not None:
            in_steps.early.name(request_id, lambda: self._key(describe()))

    def ask_early(self, request_id: str, start: int, end: int) -> None:
        """Ask for a load of the next step; see `EarlyQuestions.ask`."""
        if (in_steps := self.in_steps) is not None:
            in_steps.early.ask(request_id, start, end)

    def _key(self, load: Any) -> Any:
        return self._create_key(
            lmcache_server.tokens_of(load.op),
            load.op.start,
            load.op.end,
            request_id=load.request_id,
            cache_salt=load.cache_salt,
            request_configs=load.request_configs,
        )

    def leave(self, blocks: Collection[int] | None = None) -> None:
        """Let the engine overwrite blocks; see `ServerTransfers.leave`."""
        if self.transfers is not None:
            self.transfers.leave(blocks)

    def _block_ids_per_group(self, op: Any) -> list[list[int]]:
        assert self.transfers is not None
        blocks: list[list[int]] = op.block_ids
        return [blocks[copies.group.number] for copies in self.transfers.groups]

    def _ensure_heartbeat_started(self) -> None:
        assert self.transfers is not None
        with self._heartbeat_lock:
            if self._heartbeat is None:
                heartbeat = Heartbeat(
                    self.transfers.give_back_gone,
                    req_client=self.req_client,
                    health_event=self._health_event,
                    interval=self._heartbeat_interval,
                    instance_id=self.instance_id,
                )
                heartbeat.register_recover_callback(self._reregister_kv_caches_callback)
                heartbeat.start()
                self._heartbeat = heartbeat

    def _answers(self, timeout_s: float) -> bool:
        return answers(self.req_client, self.model_name, self.world_size, timeout_s)

    def _reregister_kv_caches_callback(self) -> bool:
        """Whether a server that was lost may be asked again, and was told of this worker."""
        return self._answers(self._mq_timeout) and bool(super()._reregister_kv_caches_callback())

    def _send_register_kv_caches_request(self, kv_caches: dict[str, Any]) -> None:
        """Register, at the start and whenever the server is there again."""
        assert self.transfers is not None
        self.kv_caches = kv_caches
        self.transfer_ctx = self.transfers
        try:
            self.transfers.register(kv_caches, self.model_name, self.world_size)
        except TimeoutError:
            raise ConnectionError(
                f"LMCache's server did not answer within {self._mq_timeout} s"
            ) from None
