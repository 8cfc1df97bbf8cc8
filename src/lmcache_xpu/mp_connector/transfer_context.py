"""LMCache's transfer context, by which a worker stores to the server's memory and loads from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from lmcache_xpu.errors import LMCacheXPUError
from lmcache_xpu.kv_connector.load_policy import LoadSpeeds
from lmcache_xpu.metrics import LOAD_SERVER, STORE_SERVER, Flow, fallback, loaded
from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.mp_connector.lent_memory import LentMemory
from lmcache_xpu.mp_connector.moves import Moves
from lmcache_xpu.mp_connector.registration import payload
from lmcache_xpu.mp_connector.server import GivenUpError, Server, union
from lmcache_xpu.mp_connector.step_loads import StepLoads
from lmcache_xpu.mp_connector.transfer_queue import Transfer, TransferQueue
from lmcache_xpu.transfer.devices import Event
from lmcache_xpu.versions.lmcache_server import MessagingFuture, TransferContext

__all__ = ["ServerTransfers"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# The engine waits so long before a step for stores of blocks that the step writes.
GRACE_S = 0.03
_POLL_S = 0.01
_PASSING = ("late", "missing", "overtaken", "server")  # the same load may succeed next time


class ServerTransfers(TransferContext):  # type: ignore[misc]  # untyped base
    """The transfers of one worker. Nothing here waits for the server, but `StepLoads.begin`.

    Args:
        instance_id: of the worker, for the server.
        client: LMCache's, of the server.
        healthy: set while the server answers; see `Server`.
        groups: copies of each KV cache group.
        chunk_tokens: tokens of a chunk.
        timeout_s: that the server has for an answer.
        draft_layers: so many layers at the end are a drafter's.

    Attributes:
        in_steps: loads inside steps; None with several groups.
    """

    def __init__(
        self,
        instance_id: int,
        client: Any,
        healthy: threading.Event,
        groups: Sequence[GroupCopies],
        chunk_tokens: int,
        timeout_s: float,
        draft_layers: int = 0,
    ) -> None:
        super().__init__(instance_id, client)
        self.groups = groups
        self._device = groups[0].device
        self._server = Server(client, instance_id, healthy, self._device, timeout_s)
        self._moves = Moves(self._server, groups, chunk_tokens)
        self._stores = TransferQueue("stores")
        self._loads = TransferQueue("loads")
        self._damaged: SimpleQueue[str] = SimpleQueue()
        self._sources: Mapping[str, Collection[int]] = {}
        self.in_steps: StepLoads | None = None
        if len(groups) == 1:
            self.in_steps = StepLoads(
                self._moves,
                groups[0],
                draft_layers,
                lambda request_id, error: self._failed(LOAD_SERVER, request_id, error),
            )

    def take_speeds(self) -> LoadSpeeds:
        """How fast the last loads beside steps were that have ended since the last call."""
        return LoadSpeeds(self._moves.take_speed())

    def compute_from(self, sources: Mapping[str, Collection[int]]) -> None:
        """Say what the requests of the next stores have computed from.

        Args:
            sources: by request, its blocks up to the last that is stored; none where no step loads.
        """
        self._sources = sources

    def take_damaged(self) -> set[str]:
        """Requests whose loads met something else than they should, since the last call."""
        damaged = set()
        while not self._damaged.empty():
            damaged.add(self._damaged.get())
        return damaged

    @property
    def busy(self) -> bool:
        """Whether any transfer is on its way, or waits for its turn."""
        in_steps = self.in_steps is not None and self.in_steps.busy
        return self._stores.busy or self._loads.busy or in_steps

    def pinned(self, address: int) -> bool | None:
        """Whether the server's memory at this address is pinned; None for other memory."""
        return self._server.pinned(address)

    def leave(self, blocks: Collection[int] | None = None) -> None:
        """Let the engine overwrite blocks that stores still read; called by its thread.

        Waits until their copies are enqueued, and lets the current stream wait for them. A store
        that can't begin in `GRACE_S` ends.

        Args:
            blocks: that are about to be written; None for any.
        """
        deadline = time.monotonic() + GRACE_S
        for transfer in self._stores.transfers():
            if blocks is None or not transfer.blocks.isdisjoint(blocks):
                transfer.leave_blocks(deadline)

    # LMCache's interface

    def register(
        self,
        _kv_caches: Any,
        model_name: str,
        world_size: int,
        _blocks_in_chunk: int = 0,
        _mq_timeout: float = 0.0,
        layout_hints: Any = None,
        engine_group_infos: Any = (),
        engine_type: Any = None,
        lmcache_chunk_tokens: int | None = None,
    ) -> None:
        """Tell the server of this worker, and map the memory that it lends. May be called again.

        The groups know the rest of what LMCache passes.

        Waits for the server; raises as `Server.map`.
        """
        registration = payload(self._instance_id, model_name, world_size, self.groups)
        registered = self._submit_registration(
            lambda: self._req_client.register_kv_cache_engine_driven_context(registration)
        )
        before = self._server.map(registered)
        self._moves.begin_with_server()
        if before is not None:
            self._give_back(before)

    def give_back_gone(self) -> None:
        """Give back the memory of a server that ended, so that the next one has room for its own.

        Waits until nothing copies. Called while the server is lost, by who notices that.
        """
        gone = self._server.take_gone()
        if gone is not None:
            self._give_back(gone)

    def _give_back(self, memory: LentMemory) -> None:
        while self.busy:  # with what had begun; the server is not healthy yet
            time.sleep(_POLL_S)
        for copies in self.groups:
            copies.forget(memory.pool)
        memory.release()

    def unregister(self) -> Any:
        """Tell the server that this worker ends; None if it was never told of it."""
        return self._submit_unregistration(
            lambda: self._req_client.unregister_kv_cache_engine_driven_context(self._instance_id)
        )

    def create_recorded_event(self) -> Event:
        """Return a point behind what the engine has enqueued so far."""
        event = Event(self._device)
        event.record()
        return event

    def submit_store(
        self,
        request_id: str,
        key: Any,
        _kv_caches: Any,
        block_ids: Sequence[Sequence[int]],
        event: Event | None,
        _blocks_in_chunk: int,
    ) -> Any:
        """Store chunks beside the engine; see `submit_retrieve`."""
        blocks = [list(ids) for ids in block_ids]
        transfer = Transfer(request_id, union(blocks), MessagingFuture())
        sources = self._sources.get(request_id, ())
        check = self.in_steps.gate(sources) if self.in_steps is not None and sources else None

        def move() -> None:
            if check is not None:
                check()
            self._moves.store(transfer, key, blocks, event)

        self._stores.add(transfer, lambda: self._succeeds(STORE_SERVER, move, transfer))
        return transfer.future

    def submit_retrieve(
        self,
        request_id: str,
        key: Any,
        _kv_caches: Any,
        block_ids: Sequence[Sequence[int]],
        event: Event | None,
        _blocks_in_chunk: int,
        skip_first_n_tokens: int = 0,
    ) -> Any:
        """Load chunks beside the engine.

        Args:
            request_id: name of the request.
            key: LMCache's, of the chunks.
            block_ids: by group, the blocks of the chunks.
            event: behind what the engine does with these blocks before.
            skip_first_n_tokens: leading tokens of the chunks that the engine has.

        Returns:
            A future that is done when nothing of the transfer is on its way any more: whether all
            chunks arrived.
        """
        blocks = [list(ids) for ids in block_ids]
        for copies, ids in zip(self.groups, blocks, strict=True):
            has = skip_first_n_tokens // copies.group.block_tokens
            ids[:has] = [NULL_BLOCK] * has
        transfer = Transfer(request_id, union(blocks), MessagingFuture())

        def move() -> None:
            self._moves.load(transfer, key, blocks, event)

        loaded("async")
        self._loads.add(transfer, lambda: self._succeeds(LOAD_SERVER, move, transfer))
        return transfer.future

    def flush_inflight_stores(self) -> None:
        """Nothing: which blocks are written is looked at in each step, see `leave`."""

    def close(self) -> None:
        """End the threads, and give the server's memory back; waits for copies on their way."""
        self._mark_closed()
        self._server.leave()
        if self.in_steps is not None:
            self.in_steps.close()
        self._stores.close()
        self._loads.close()
        self._server.release()

    def _succeeds(self, flow: Flow, move: Callable[[], None], transfer: Transfer) -> bool:
        """Whether a transfer succeeds; a failure is counted, and logged where it is news."""
        try:
            move()
        except Exception as error:  # whatever it is: it costs a hit, and the engine goes on
            self._failed(flow, transfer.request, error)
            if flow is LOAD_SERVER:
                fallback("load")
            return False
        return True

    def _failed(self, flow: Flow, request_id: str, error: Exception) -> None:
        if isinstance(error, GivenUpError):
            reason = error.reason
        else:
            reason = type(error).__name__
            logger.warning(
                "A %s between the engine and LMCache's server failed: %s "
                "(docs: troubleshooting#transfer-failed)",
                flow.direction,
                error,
                exc_info=None if isinstance(error, LMCacheXPUError) else error,
            )
        flow.failed(reason)
        if flow is LOAD_SERVER and reason not in _PASSING:
            self._damaged.put(request_id)
