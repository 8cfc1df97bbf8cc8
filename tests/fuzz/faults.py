"""Single faults for the fuzzer to see: each takes one thing that the package does away."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from support.kernels import TritonTransfer

from lmcache_xpu.gpu_connector import registered_cache
from lmcache_xpu.gpu_connector.finisher import Finisher
from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.gpu_connector.load_pipeline import LoadPipeline
from lmcache_xpu.gpu_connector.registered_cache import Registration
from lmcache_xpu.tiers.disk import chunk_directory, chunk_file, chunk_store
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.lock import DirectoryLock
from lmcache_xpu.tiers.disk.tier import DiskTier
from lmcache_xpu.tiers.disk.writer import DiskWriter
from lmcache_xpu.transfer import plan, staging
from lmcache_xpu.transfer.direct import HostKernels
from lmcache_xpu.transfer.gather_scatter import TorchTransfer
from lmcache_xpu.transfer.host_copies import HostCopies
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.segments import Segments
from lmcache_xpu.transfer.slots import RequestRows, Rows, Slots
from lmcache_xpu.transfer.handles import TransferHandle
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.staging_ring import Buffer


class Fault(NamedTuple):
    """An attribute that is replaced while a target runs."""

    name: str
    target: str
    owner: Any
    attribute: str
    replacement: Any

    def planted(self) -> contextlib.AbstractContextManager[object]:
        if isinstance(self.owner, dict):
            return mock.patch.dict(self.owner, {self.attribute: self.replacement})
        return mock.patch.object(self.owner, self.attribute, self.replacement)


FAULTS: list[Fault] = []


def fault(name: str, target: str, owner: Any, attribute: str) -> Callable[[Any], Any]:
    """What is decorated makes the replacement from the original."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        original = None if isinstance(owner, dict) else getattr(owner, attribute)
        FAULTS.append(Fault(name, target, owner, attribute, make(original)))
        return make

    return add


# Copies


@fault("the last slot is off by one", "copies", registered_cache, "check_slots")
def _(check: Any) -> Any:
    def wrong(view: PagedView, mapping: torch.Tensor) -> Slots:
        numbers, holes = check(view, mapping)
        numbers = numbers.clone()
        numbers[-1:] -= view.tokens_per_row * (numbers[-1:] >= view.tokens_per_row)
        return Slots(numbers, holes)

    return wrong


@fault("tokens without a slot go to the first one", "copies", registered_cache, "check_slots")
def _(check: Any) -> Any:
    return lambda view, mapping: Slots(check(view, mapping).numbers.clamp(min=0), holes=False)


@fault("keys and values of the last layer are exchanged", "copies", PagedView, "from_engine")
def _(read: Any) -> Any:
    def wrong(*args: Any, **given: Any) -> PagedView:
        view = read(*args, **given)
        return dataclasses.replace(view, tensors=(*view.tensors[:-1], view.tensors[-1][::-1]))

    return wrong


@fault("the last token of the last chunk is left out", "copies", RequestRows, "chunks")
def _(chunks: Any) -> Any:
    def wrong(self: RequestRows, first: int, last: int) -> Rows:
        rows = chunks(self, first, last)
        if last < len(self.totals):
            return rows
        host = torch.arange(rows.total) if rows.host is None else rows.host
        return Rows(rows.engine[:-1], host[:-1], rows.total)

    return wrong


@fault("tokens that the engine has are overwritten", "copies", staging, "request_rows")
def _(rows: Any) -> Any:
    return lambda view, slots, spans, cached, upload: rows(view, slots, spans, 0, upload)


@fault(
    "a cache that the engine moved is not looked at anew", "copies", Registration, "_is_registered"
)
def _(_: Any) -> Any:
    return lambda self, bound, kvcaches: True


@fault("addresses of another layer's chunks are used", "copies", HostKernels, "_table")
def _(table: Any) -> Any:
    def wrong(self: HostKernels, piece: plan.Piece, memory: Any, tables: Any) -> Any:
        first = vars(piece.rows.request).setdefault("tables", {})
        if piece.chunks not in first:  # the memory is kept, too
            first[piece.chunks] = memory, table(self, piece, memory, tables)
        return first[piece.chunks][1]

    return wrong


@fault("planes and layers of host memory are exchanged", "copies", plan._ORDERS, "planes")
def _(_: Any) -> Any:
    return (2, 1, 3)


@fault("heads are taken to lie side by side", "copies", TorchTransfer, "of")
def _(prepare: Any) -> Any:
    def wrong(view: PagedView) -> TorchTransfer:
        made = prepare(view)
        return dataclasses.replace(made, within=torch.arange(len(made.within)))

    return wrong


@fault("a store does not bring the rows that stay", "copies", Stager, "_store_staged")
def _(stage: Any) -> Any:
    def wrong(self: Stager, *args: Any) -> None:
        with mock.patch.object(self._host, "load", return_value=None):
            stage(self, *args)

    return wrong


@fault("values are taken from where keys are", "copies", plan, "_segments")
def _(segments: Any) -> Any:
    def wrong(*args: Any) -> Segments:
        right = segments(*args)
        return Segments(right.offsets[:1] * len(right.offsets), right.sizes)

    return wrong


@fault("the last of several pieces is left out", "copies", plan.Piece, "parts")
def _(parts: Any) -> Any:
    def wrong(self: plan.Piece, buffer_bytes: int) -> list[plan.Piece]:
        every = list(parts(self, buffer_bytes))
        return every[:-1] or every

    return wrong


@fault("every group of layers goes to the first one", "copies", Stager, "load")
def _(load: Any) -> Any:
    return lambda self, pieces, memory, first=0, **given: load(self, pieces, memory, 0, **given)


@fault("what is stored through the ring stays in it", "copies", HostCopies, "flush")
def _(_: Any) -> Any:
    return lambda self: None


@fault("the kernel takes every row of a chunk", "copies", TritonTransfer, "_launch")
def _(launch: Any) -> Any:
    return lambda self, rows, *args, **given: launch(
        self, Rows(rows.engine, None, rows.total), *args, **given
    )


# Steps of an engine


class _NoWait:
    def __init__(self, event: Any) -> None:
        self.record = event.record

    def wait(self) -> None:
        """Nothing."""


@fault("a scatter does not wait for its copy", "steps", Buffer, "__init__")
def _(make: Any) -> Any:
    def wrong(self: Buffer, size: int, device: torch.device) -> None:
        make(self, size, device)
        self.filled = _NoWait(self.filled)

    return wrong


@fault("a buffer is filled before it was emptied", "steps", Buffer, "take")
def _(_: Any) -> Any:
    return lambda self, nbytes: self._memory[:nbytes]


@fault("the engine does not wait for a layer", "steps", LoadPipeline, "before_layer")
def _(_: Any) -> Any:
    def wrong(self: LoadPipeline, layer: int) -> None:
        groups = sum(start <= layer for start in self._starts)
        if self.failed_behind is None and groups > self._waited:
            self._enqueue(groups)
            self._waited = groups

    return wrong


@fault("the engine writes blocks that a store still reads", "steps", InFlight, "add_store")
def _(add: Any) -> Any:
    def wrong(self: InFlight, *args: Any) -> None:
        add(self, *args)
        self._reading.clear()

    return wrong


@fault("loads and stores do not wait for the engine", "steps", Stager, "follow_engine")
def _(_: Any) -> Any:
    return lambda self: None


@fault("memory is not held while it is copied", "steps", InFlight, "hold")
def _(_: Any) -> Any:
    return lambda self, load, objs: None


@fault("chunks are published before they are complete", "steps", Finisher, "when_done")
def _(_: Any) -> Any:
    return lambda self, moves, action: action()


@fault("a load that failed is not reported", "steps", InFlight, "end_step")
def _(end: Any) -> Any:
    return lambda self: end(self)[:0]


@fault("a load that failed is not waited for", "steps", Stager, "fence")
def _(_: Any) -> Any:
    return lambda self: TransferHandle(
        staging.Event(self.view.device), staging.Event(self.view.device)
    )


@fault("after an error what is on its way is forgotten", "steps", Stager, "whole")
def _(_: Any) -> Any:
    return lambda self: contextlib.nullcontext()


@fault("a load is done when it is copied", "steps", Stager, "load")
def _(load: Any) -> Any:
    def wrong(self: Stager, *args: Any, **given: Any) -> TransferHandle:
        handle = load(self, *args, **given)
        handle.done.record(self._copies)
        return handle

    return wrong


# Disk


@fault("checksums are not compared", "disk", chunk_store, "read_chunk")
def _(read: Any) -> Any:
    def wrong(*args: Any) -> str | None:
        found = read(*args)
        return None if found == "its checksum does not match" else found

    return wrong


@fault("a file is not asked whose chunk it holds", "disk", chunk_store, "read_chunk")
def _(read: Any) -> Any:
    def wrong(path: Any, key: str, info: Any, buffer: memoryview) -> str | None:
        header = chunk_file._parse(path.read_bytes()[: chunk_file.HEADER_BYTES])
        return read(path, header.key, header.info, buffer) if header else "damaged"

    return wrong


@fault("a scan takes files that were cut", "disk", chunk_directory, "scan_chunk")
def _(_: Any) -> Any:
    def wrong(path: Any) -> Any:
        header = chunk_file._parse(path.read_bytes()[: chunk_file.HEADER_BYTES])
        return header and (header.key, header.info, path.stat().st_mtime_ns)

    return wrong


@fault("a restart forgets when chunks were used", "disk", chunk_directory, "scan_chunk")
def _(scan: Any) -> Any:
    def wrong(path: Any) -> Any:
        found = scan(path)
        return found and (found[0], found[1], 0)

    return wrong


@fault("what was used last goes first", "disk", ChunkIndex, "evict")
def _(_: Any) -> Any:
    def wrong(self: ChunkIndex, need: int) -> Iterator[str]:
        while not self.fits(need):
            free = [key for key in self._entries if not self.pinned(key)]
            yield max(free, key=lambda key: self._entries[key].used_ns)

    return wrong


@fault("pins do not protect", "disk", ChunkIndex, "evict")
def _(_: Any) -> Any:
    def wrong(self: ChunkIndex, need: int) -> Iterator[str]:
        for key in sorted(self._entries, key=lambda key: self._entries[key].used_ns):
            if self.fits(need):
                return
            yield key

    return wrong


@fault("the limit is not kept", "disk", ChunkIndex, "fits")
def _(_: Any) -> Any:
    return lambda self, need: True


@fault("a chunk that is removed leaves its file", "disk", ChunkStore, "_remove")
def _(_: Any) -> Any:
    return lambda self, key: self._index.remove(key)


@fault("a file is named before it is complete", "disk", chunk_directory, "_TEMPORARY")
def _(_: Any) -> Any:
    return ".lmxkv.part"


@fault("two stores may have one directory", "disk", DirectoryLock, "_try")
def _(_: Any) -> Any:
    return lambda self: True


@fault("a chunk of another model is served after a restart", "tier", DiskTier, "_name")
def _(_: Any) -> Any:
    return lambda self, key: key.chunk_hash_hex


@fault("what is queued is not written at the end", "tier", DiskWriter, "close")
def _(_: Any) -> Any:
    def wrong(self: DiskWriter) -> None:
        self._closed = True
        self._threads.shutdown(cancel_futures=True)

    return wrong


@fault("a flipped bit on disk is served", "tier", chunk_file.zlib, "crc32")
def _(_: Any) -> Any:
    return lambda data, crc=0: 7
