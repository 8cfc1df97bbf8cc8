"""An error in a load or a store costs a recomputation, never the engine and never a wrong token.

LMCache lets exceptions of a load or a store through to vLLM, where they end the engine. And a load
that came up short has a second consequence: what the engine computes in the same step, from
blocks that hold anything, would be stored under keys that promise the right content.

So, in the worker, per request:

    load    an error, or fewer tokens than promised: the slots go to `unfilled`, from where vLLM
            learns its blocks and computes them again
    store   an error: nothing more of the request is stored in this step; what was published of a
            chunk without its last layer is taken back
    both    requests that read an unfilled block store nothing until it is given away

Wraps methods of one LMCache engine and its connector; the protocols are those of `layerwise`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU, Flow, fallback
from lmcache_xpu.transfer.slots import blocks_of

__all__ = ["Guard"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Layers = Generator[Any, Any, None]


class Guard:
    """Stands between LMCache's adapter and its engine in one worker.

    Args:
        adapter: LMCache's connector for vLLM.
        block_size: tokens of a block.
    """

    def __init__(self, adapter: Any, block_size: int) -> None:
        self._adapter = adapter
        self._engine: Any = adapter.lmcache_engine
        self._block_size = block_size
        self._objects: int = self._engine.num_layers  # of a chunk: groups of the model's layers
        self._unfilled: set[int] = set()  # to be reported
        self._bad: set[int] = set()  # until they are written anew
        engine, connector = self._engine, self._engine.gpu_connector
        if engine.use_layerwise:
            self._groups: Sequence[tuple[int, int]] = connector.groups
            connector.batched_to_gpu = functools.partial(self._to_layers, connector.batched_to_gpu)
            engine.retrieve_layer = functools.partial(self._retrieve_layer, engine.retrieve_layer)
            engine.store_layer = functools.partial(self._store_layer, engine.store_layer)
        else:
            connector.batched_to_gpu = functools.partial(self._to_chunks, connector.batched_to_gpu)
            engine.retrieve = functools.partial(self._retrieve, engine.retrieve)
            engine.store = functools.partial(self._store, engine.store)

    def begin_step(self, written: frozenset[int] | None) -> None:
        """Take blocks that are written anew for good ones.

        The others that are unfilled stay so. With asynchronous scheduling a request goes on for one
        more step before the scheduler hears of its failure, and what that step computes is wrong.

        Args:
            written: blocks that were given to a request since the last step; None if that is not
                known, which clears nothing.
        """
        self._bad -= written or frozenset()

    def refuse(self, requests: list[Any]) -> None:
        """Before a step's loads: report them as failed, and store nothing of the step."""
        for request in requests:
            spec, request.load_spec = request.load_spec, None
            if spec is not None and spec.can_load:
                first, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
                self._unfilled |= blocks_of(request.slot_mapping[first:end], self._block_size)
            if request.save_spec is not None:
                request.save_spec.can_save = False

    def take_unfilled(self) -> set[int]:
        """Blocks that loads left unfilled since the last call."""
        self._collect()
        blocks, self._unfilled = self._unfilled, set()
        return blocks

    def withhold(self, requests: list[Any]) -> None:
        """Before a step's stores are completed: none of what was computed from unfilled blocks."""
        self._collect()
        for request in requests:
            blocks = blocks_of(request.slot_mapping, self._block_size)
            if blocks & self._bad and request.save_spec is not None:
                request.save_spec.can_save = False
                if storer := self._adapter._layerwise_save_storers.pop(request.req_id, None):
                    storer.close()
                    self._take_back(request.token_ids)

    def _collect(self) -> None:
        """Add what the connector found missing, and what LMCache did (it reports that itself)."""
        failed: list[torch.Tensor] = self._engine.gpu_connector.failed_slots
        while failed:
            self._unfilled |= blocks_of(failed.pop(), self._block_size)
        bad = self._unfilled | self._adapter._invalid_block_ids
        if bad - self._bad:
            fallback("load")
        self._bad |= bad

    # Loads

    def _to_chunks(self, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The standard connector's load. LMCache gives up its references however it ends."""
        try:
            load(*args, **kwargs)
        except Exception as error:
            self._lost(error, kwargs, args[1][0])

    def _to_layers(
        self, load: Callable[..., Layers], starts: Any, ends: Any, **kwargs: Any
    ) -> Layers:
        """The layerwise connector's load; after an error it takes the layers and drops them."""
        inner: Layers | None = load(starts, ends, **kwargs)
        given = None
        for _ in range(self._objects + 2):
            if inner is not None:
                try:
                    inner.send(given)
                except Exception as error:
                    self._lost(error, kwargs, starts[0])
                    inner = None
            given = yield

    def _retrieve(self, retrieve: Callable[..., Any], tokens: Any, *args: Any, **kw: Any) -> Any:
        """LMCache's own part of a load. Nothing found is what its adapter can deal with."""
        try:
            return retrieve(tokens, *args, **kw)
        except Exception as error:
            self._lost(error, kw, 0)
            return torch.zeros(len(tokens), dtype=torch.bool)

    def _retrieve_layer(
        self, retrieve: Callable[..., Layers], tokens: Any, mask: Any, **kwargs: Any
    ) -> Layers:
        """As `_retrieve`, layer by layer; also when LMCache finds less than it promised.

        Of the calls for a group's layers LMCache sees the one for the first: the group before is to
        be there by then.
        """
        skipped = len(tokens) - int(mask.sum())
        inner: Layers | None
        try:
            inner, found = self._first_layer(retrieve, tokens, mask, kwargs)
            if found < len(tokens):
                self._lost(f"{found - skipped} of {len(tokens) - skipped} tokens", kwargs, found)
            if found == skipped:
                inner = None  # LMCache's own generator fails at its end
        except Exception as error:
            self._lost(error, kwargs, skipped)
            inner = None
        yield None
        nothing = torch.zeros(len(tokens), dtype=torch.bool)
        for calls in (1, *(last - first for first, last in self._groups)):
            retrieved = None
            if inner is not None:
                try:
                    retrieved = next(inner)
                except Exception as error:
                    self._lost(error, kwargs, skipped)
                    inner = None
            for _ in range(calls):
                yield nothing if retrieved is None else retrieved

    def _first_layer(
        self, retrieve: Callable[..., Layers], tokens: Any, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Layers, int]:
        """Begin a load; the tokens that are there, from the first one of the request."""
        skipped = len(tokens) - int(mask.sum())
        inner = retrieve(tokens, mask, **kwargs)
        try:
            found = next(inner)
        except AssertionError:  # chunks in several tiers; LMCache loads from one
            everywhere = self._engine.retrieve_locations
            self._engine.retrieve_locations = [self._best_tier(tokens, mask)]
            try:
                inner = retrieve(tokens, mask, **kwargs)
                found = next(inner)
            finally:
                self._engine.retrieve_locations = everywhere
        return inner, skipped + int(found or 0)

    def _best_tier(self, tokens: Any, mask: Any) -> str:
        """The tier that holds most of the prefix."""
        manager = self._engine.storage_manager
        keys = [k.split_layers(self._objects)[0] for _, _, k in self._keys(tokens, mask)]
        held: dict[str, int] = dict.fromkeys(manager.storage_backends, 0)
        for name in held:
            for key in keys:
                if not manager.contains(key, [name]):
                    break
                held[name] += 1
        return max(held, key=lambda name: held[name])

    # Stores

    def _store(self, store: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The standard mode's store: an error comes before anything is published."""
        try:
            store(*args, **kwargs)
        except Exception as error:
            _complain(STORE_CPU, "store", error)

    def _store_layer(
        self, store: Callable[..., Layers], tokens: Any, mask: Any = None, **kwargs: Any
    ) -> Layers:
        """The layerwise mode's store: an error may come when some layers are published.

        Of the calls for a group's layers LMCache sees the one for the last, and the one at the end.
        """
        inner: Layers | None = store(tokens, mask=mask, **kwargs)
        try:
            for calls in (*(last - first for first, last in self._groups), 1):
                for _ in range(calls - 1):
                    yield
                if inner is not None:
                    try:
                        next(inner)
                    except Exception as error:
                        _complain(STORE_CPU, "store", error)
                        inner = None
                        self._take_back(tokens, mask)
                yield
        finally:
            if inner is not None:
                inner.close()

    def _take_back(self, tokens: Any, mask: Any = None) -> None:
        """Remove chunks that miss layers: LMCache asks for the first alone and would keep them."""
        manager = self._engine.storage_manager
        if (overlap := self._engine.gpu_connector.overlap) is not None:
            overlap.drain()  # what is complete only now is to be published first
        for _, _, key in self._keys(tokens, mask):
            layers = key.split_layers(self._objects)
            if not all(manager.contains(layer) for layer in layers):
                for layer in layers:
                    manager.remove(layer)

    def _keys(self, tokens: Any, mask: Any) -> Any:
        return self._engine.token_database.process_tokens(tokens=tokens, mask=mask)

    def _lost(self, why: Exception | str, kwargs: dict[str, Any], first: int) -> None:
        """The tokens of a load from `first` on are not in the engine's cache."""
        first = max(first, kwargs.get("vllm_cached_tokens", 0))
        self._unfilled |= blocks_of(kwargs["slot_mapping"][first:], self._block_size)
        _complain(LOAD_CPU, "load", why)


def _complain(flow: Flow, what: str, why: Exception | str) -> None:
    flow.failed(type(why).__name__ if isinstance(why, Exception) else "incomplete")
    trace = why if isinstance(why, Exception) else None
    logger.error("A %s failed and is %s: %s", what, _ENDS[what], why, exc_info=trace)


_ENDS = {"load": "computed instead", "store": "left out"}
