"""A worker's transfers between the engine's KV cache and the memory that LMCache's server lends.

Loads inside steps are in `step_loads`; all others, and stores, are here, in threads.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from queue import SimpleQueue

from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload

from lmcache_xpu.cache.protocol import Cache, TokenRange
from lmcache_xpu.cache.server import GivenUpError, LentMemory, Server
from lmcache_xpu.copies.group_copies import GroupCopies, block_ids
from lmcache_xpu.copies.moves import Moves
from lmcache_xpu.copies.step_loads import StepLoads
from lmcache_xpu.copies.transfer_queue import Transfer, TransferQueue
from lmcache_xpu.errors import LMCacheXPUError
from lmcache_xpu.metrics import Flow, fallback, loaded
from lmcache_xpu.transfer.devices import Event, event_at

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# The engine waits so long before a step for stores of blocks that the step writes.
GRACE_S = 0.03
_POLL_S = 0.01
_PASSING = ("late", "missing", "overtaken", "server")  # the same load may succeed next time


class Transfers:
    """The transfers of one worker. Nothing here waits for the server, but `StepLoads.begin`.

    The server has `timeout_s` for an answer. For layers, and loads inside steps, see `StepLoads`.
    """

    def __init__(
        self,
        client: Cache,
        groups: Sequence[GroupCopies],
        timeout_s: float,
        layers: Iterable[str],
        draft_layers: int = 0,
    ) -> None:
        self.groups, self._kv_groups = groups, [copies.group for copies in groups]
        if client.local is not None and client.local.is_float8:
            for copies in groups:
                copies.hold_float8()
        self._client = client
        self._device = groups[0].device
        self._server = Server(client.healthy, self._device, timeout_s)
        self.moves = Moves(self._server, groups, client)
        load_failed = functools.partial(self._failed, client.load_flow)
        self._stores = TransferQueue("stores", functools.partial(self._failed, client.store_flow))
        self._loads = TransferQueue("loads", load_failed)
        self._damaged: SimpleQueue[str] = SimpleQueue()
        self._waited: list[Transfer] = []  # loads, until `take_ended` names their requests
        self._unfilled: set[int] = set()
        flow = client.load_flow
        self.in_steps = StepLoads(self.moves, groups, layers, draft_layers, flow, load_failed)

    def take_damaged(self) -> set[str]:
        """Requests whose loads met something else than they should, since the last call."""
        return {self._damaged.get() for _ in range(self._damaged.qsize())}

    @property
    def busy(self) -> bool:
        """Whether any transfer is on its way, or waits for its turn."""
        threads = self._stores.transfers() or self._loads.transfers()
        return bool(threads) or self.in_steps.outcomes.pending

    def let_write(self, blocks: Collection[int] | None = None) -> None:
        """Let the engine's thread enqueue writes to these blocks, or any, which stores still read.

        Waits until their copies are enqueued, and lets the current stream wait for them. Stores
        that can't begin in `GRACE_S` end.
        """
        deadline = time.monotonic() + GRACE_S
        for transfer in self._stores.transfers():
            if blocks is None or not transfer.blocks.isdisjoint(blocks):
                transfer.leave_blocks(deadline)

    def register(self) -> None:
        """Tell the server of this worker, and map the memory that it lends. May be called again.

        Waits for the server; raises as `Server.map`.
        """
        before, local = None, self._client.local
        if local is None:
            # LMCache's server registers the first KV cache group, as one layer of one token of
            # bytes: their order in an object is this package's own. Its module knows all groups.
            described = RegisterEngineDrivenContextPayload(
                instance_id=self._client.instance_id,
                model_name=self._client.scope.model_name,
                world_size=self._client.scope.world_size,
                block_size=self.groups[0].group.block_tokens,
                num_layers=1,
                hidden_dim_size=self.groups[0].object_bytes,
                dtype_str="uint8",
                use_mla=True,  # one plane
                num_physical_slots=1,
            )
            requests = self._client.requests
            before = self._server.map(requests.register_kv_cache_engine_driven_context(described))
        else:
            self._server.lend(local.memory())
        self.moves.begin_with_server()
        if before is not None:
            self._give_back(before)

    def register_again(self) -> bool:
        """Do as `register` with a server that was lost; whether that succeeded."""
        try:
            self.register()
        except (LMCacheXPUError, TimeoutError) as error:
            logger.warning(
                "LMCache's server does not take this worker again: %s "
                "(docs: troubleshooting#server-lost)",
                error,
            )
            return False
        return True

    def give_back_gone(self) -> None:
        """Give back the memory of a server that ended: the next one needs the room.

        Waits until nothing copies. Called while the server is lost.
        """
        if (gone := self._server.take_gone()) is not None:
            self._give_back(gone)

    def unregister(self) -> None:
        """Tell the server that this worker ends; waits for it."""
        self.moves.end_with_server()
        if self._client.local is not None:
            return
        requests = self._client.requests
        ended = requests.unregister_kv_cache_engine_driven_context(self._client.instance_id)
        if not ended.wait(self._client.timeout_s):
            logger.warning(
                "LMCache's server did not hear that this worker ends "
                "(docs: troubleshooting#server-lost)"
            )

    def _give_back(self, memory: LentMemory) -> None:
        while self.busy:  # with what had begun; the server is not healthy yet
            time.sleep(_POLL_S)
        memory.release()

    def event(self) -> Event:
        """Return a point behind what the engine has enqueued so far."""
        return event_at(self._device)

    def store(self, chunks: TokenRange, event: Event, sources: Collection[int]) -> Transfer:
        """Store chunks, behind an event of the engine, and beside what follows.

        `sources` are the block IDs that they were computed from; empty where no step loads.
        """
        transfer = Transfer(chunks.request_id, block_ids(chunks, self._kv_groups))
        gates = [self.in_steps.outcomes.gate(sources)] if sources else []
        move = functools.partial(self.moves.store, transfer, chunks, event)
        self._stores.add(transfer, *gates, move)
        return transfer

    def load(self, chunks: TokenRange, event: Event) -> Transfer:
        """Load chunks, behind an event of the engine; `take_ended` names their request."""
        transfer = Transfer(chunks.request_id, block_ids(chunks, self._kv_groups))
        loaded("async")
        self._waited.append(transfer)
        self._loads.add(transfer, functools.partial(self.moves.load, transfer, chunks, event))
        return transfer

    def fail(self, unserved: Mapping[str, frozenset[int]]) -> None:
        """Count loads as failed that nobody described: block IDs by request that waits."""
        for request_id, blocks in unserved.items():
            transfer = Transfer(request_id, blocks)
            transfer.end(False)
            self._waited.append(transfer)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return requests whose loads have ended since the last call, and of them the failed."""
        ended = [transfer for transfer in self._waited if transfer.result is not None]
        self._waited = [transfer for transfer in self._waited if transfer not in ended]
        failed = [transfer for transfer in ended if not transfer.result]
        self._unfilled.update(*(transfer.blocks for transfer in failed))
        return {each.request for each in ended}, {each.request for each in failed}

    def take_unfilled(self) -> set[int]:
        """Return the block IDs of loads that `take_ended` named as failed since the last call."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def close(self) -> None:
        """End the threads, and give the server's memory back; waits for copies on their way."""
        self._client.healthy.clear()  # nobody waits for an answer any more
        self.in_steps.close()
        self._stores.close()
        self._loads.close()
        self._server.release()

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
        if flow is self._client.load_flow:
            fallback("load")
            if reason not in _PASSING:
                self._damaged.put(request_id)
