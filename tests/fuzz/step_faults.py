"""Faults in what waits for what, in the steps of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from fault import Faults

from lmcache_xpu.cache.local_cache import LocalCache
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.load_pipelines import LoadPipeline
from lmcache_xpu.copies.moves import Moves
from lmcache_xpu.copies.pending_failures import Outcomes
from lmcache_xpu.copies.step_loads import StepLoads
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.transfer import host_copies
from lmcache_xpu.transfer.devices import Event, StoreHandle
from lmcache_xpu.transfer.host_copies import Buffer, StagingRing
from lmcache_xpu.transfer.staging import Stager

FAULTS = Faults()
fault = FAULTS.add


class _NoWait:
    def __init__(self, event: Any) -> None:
        self.record = event.record

    def wait(self) -> None:
        """Nothing."""


@fault("a scatter does not wait for its copy", "steps", StagingRing, "take")
def _(take: Any) -> Any:
    def wrong(self: StagingRing, nbytes: int) -> Buffer:
        buffer = take(self, nbytes)
        return buffer._replace(filled=_NoWait(buffer.filled))

    return wrong


@fault("a buffer is filled before it was emptied", "steps", StagingRing, "take")
def _(take: Any) -> Any:
    def wrong(self: StagingRing, nbytes: int) -> Buffer:
        self._used.clear()
        return take(self, nbytes)

    return wrong


@fault("the engine does not wait for a layer", "steps", LoadPipeline, "before_layer")
def _(_: Any) -> Any:
    def wrong(self: LoadPipeline, layer: int) -> None:
        groups = sum(start <= layer for start in self.starts)
        self.enqueue(groups)
        self._waited = max(self._waited, groups)

    return wrong


@fault("the engine waits for one KV cache group alone", "steps", LoadPipeline, "_last")
def _(last: Any) -> Any:
    def wrong(self: LoadPipeline, first: int, end: int | None = None) -> Any:
        if end is None:
            return last(self, first)
        groups = zip(self._groups[first:end], self.done[first:end], strict=False)
        return [done for copy, done in groups if copy.stager is self.stagers[0]]

    return wrong


@fault("the engine writes blocks that a store still reads", "steps", Transfers, "let_write")
def _(_: Any) -> Any:
    return lambda self, blocks=None: None


@fault("blocks are given away while their store is enqueued", "steps", Transfer, "enqueued")
def _(enqueued: Any) -> Any:
    return lambda self, read: enqueued(self, [])


@fault("loads and stores do not wait for the engine", "steps", Stager, "follow_engine")
def _(_: Any) -> Any:
    return lambda self: None


@fault("memory is not held while it is copied", "steps", Moves, "locate")
def _(locate: Any) -> Any:
    def wrong(self: Moves, asked: Any, *args: Any) -> Any:
        located = locate(self, asked, *args)
        self.end_load(asked)
        return located

    return wrong


@fault("what a load has read stays locked", "steps", LocalCache, "release")
def _(_: Any) -> Any:
    return lambda self, number, key: None


@fault("chunks are published before they are complete", "steps", GroupCopies, "store")
def _(store: Any) -> Any:
    def wrong(self: GroupCopies, *args: Any) -> list[StoreHandle]:
        never = host_copies.Event(self.device)
        return [handle._replace(done=never) for handle in store(self, *args)]

    return wrong


@fault("a load that failed is not reported", "steps", LoadPipeline, "end")
def _(end: Any) -> Any:
    return lambda self, layers: end(self, layers) or True


@fault("what came of a failed load is stored", "steps", Outcomes, "gate")
def _(_: Any) -> Any:
    return lambda self, blocks: lambda: None


@fault("a load writes blocks that the engine has", "steps", StepLoads, "ask")
def _(ask: Any) -> Any:
    return lambda self, load: ask(self, dataclasses.replace(load, kept=0))


@fault("a load that failed is not waited for", "steps", Stager, "fence")
def _(_: Any) -> Any:
    return lambda self: host_copies.Event(self.view.device)


@fault("after an error what is on its way is forgotten", "steps", Stager, "whole")
def _(_: Any) -> Any:
    return lambda self: contextlib.nullcontext()


@fault("a load is done when it is copied", "steps", Stager, "load")
def _(load: Any) -> Any:
    def wrong(self: Stager, *args: Any, **options: Any) -> Event:
        done = load(self, *args, **options)
        done.record(self._link)
        return done

    return wrong
