"""LMCache's engine, in which an error costs a recomputation, never vLLM's engine or a wrong token.

LMCache lets exceptions of a load or a store through to vLLM, where they end the engine. Here, in
the worker, per request:

    load    an error, or fewer tokens than promised: the blocks count as unfilled, and vLLM computes
            them again (see `unfilled_blocks`, and `guarded_connectors` for errors of the copies)
    store   an error: nothing more of the request is stored in this step; what was published of a
            chunk without its last layer is taken back

The protocols of the generators are those of `gpu_connector.layerwise`, but for what `layer_calls`
says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.cache_engine.health import pool
from lmcache_xpu.cache_engine.layer_calls import Layers, load_calls, store_calls
from lmcache_xpu.cache_engine.layer_loans import Spans, borrow_layers, lend_layers, name_of
from lmcache_xpu.cache_engine.loans import loaded_tokens, order_of
from lmcache_xpu.cache_engine.storage_manager import POOL, StorageManager
from lmcache_xpu.cache_engine.unfilled_blocks import log_failure
from lmcache_xpu.metrics import STORE_CPU
from lmcache_xpu.versions.lmcache import LMCacheEngine

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

    from lmcache_xpu.cache_engine.guarded_connectors import LayerwiseConnector, StandardConnector
    from lmcache_xpu.cache_engine.loans import Borrower, Lender
    from lmcache_xpu.cache_engine.token_database import TokenDatabase
    from lmcache_xpu.gpu_connector.in_flight import InFlight

__all__ = ["CacheEngine"]

Tokens = torch.Tensor | Sequence[int]


class CacheEngine(LMCacheEngine):  # type: ignore[misc]  # untyped base
    """LMCache's engine of one worker.

    Look-ups come in a thread of their own, loads that requests wait for in another one, and all
    else in vLLM's.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's description of vLLM's engine.
        token_database: names chunks.
        gpu_connector: moves their bytes.
        broadcast, broadcast_object: between the workers of a tensor parallel group.
    """

    post_inited: bool
    retrieve_locations: list[str] | None

    def __init__(
        self,
        config: Any,
        metadata: Any,
        token_database: TokenDatabase,
        gpu_connector: StandardConnector | LayerwiseConnector,
        broadcast: Callable[..., Any],
        broadcast_object: Callable[..., Any],
    ) -> None:
        super().__init__(
            config, metadata, token_database, gpu_connector, broadcast, broadcast_object
        )
        self.unfilled = gpu_connector.unfilled
        # A layerwise load begins with attributes that each load sets, in either thread.
        self._beginning = threading.Lock()
        # Where ranks hold the same, one of the two; see `loans`.
        self.lender: Lender | None = None
        self.borrower: Borrower | None = None
        self.refuses_lookups = False  # while the weights are not those of any stored KV
        # LMCache's own events name tokens that `cache_salt` exchanged; see `kv_events`.
        self.kv_events_enabled = False

    def post_init(self, **kwargs: Any) -> None:
        """Open the tiers, in each worker; see `config.keep_own_copies`."""
        if not self.post_inited:
            self.storage_manager = StorageManager(self.config, self.metadata, self.event_manager)
            self.post_inited = True

    def register(self, kv_caches: Sequence[torch.Tensor], in_flight: InFlight) -> None:
        """Bind to vLLM's KV cache, and let transfers run beside its steps from now on.

        Pins LMCache's memory, while nobody waits: a driver may take seconds for many GiB.

        Args:
            kv_caches: one tensor for each layer.
            in_flight: the transfers that run beside vLLM's steps.

        Raises:
            LayoutError: a KV cache that can't be read.
        """
        self.gpu_connector.initialize_kvcaches_ptr(kvcaches=kv_caches)
        if (memory := pool(self)) is not None:
            self.gpu_connector.pin(memory)
        self.gpu_connector.overlap = self.storage_manager.in_flight = in_flight

    # Look-ups

    def lookup(self, *args: Any, **kwargs: Any) -> int:
        """Return how many tokens can be loaded; see LMCache's engine.

        A rank that borrows has whatever the first one has: the scheduler takes the least.
        """
        if self.refuses_lookups:
            return 0
        if self.borrower is not None:
            return sum(kwargs["offsets"])
        length: int = super().lookup(*args, **kwargs)
        return length

    def far_tokens(self, lookup_id: str) -> int:
        """Return how many tokens a look-up has found beyond this host's memory.

        Args:
            lookup_id: its name; what it found is still pinned, or nothing is returned.
        """
        tiers = self.lookup_pins.get(lookup_id, {})
        far = sum(len(keys) for name, keys in tiers.items() if name != POOL)
        objects: int = self.num_layers if self.use_layerwise else 1
        tokens: int = far // objects * self.config.chunk_size
        return tokens

    # Loads

    def retrieve(self, tokens: Tokens, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """Load a request's chunks; raises nothing.

        Returns:
            Which tokens were loaded, `[tokens]` bool on the host; none after an error, which is
            what LMCache's adapter can deal with.
        """
        if self.borrower is not None:
            return self._borrow(self.borrower, tokens, kwargs)
        self.settle()
        loaded = self._retrieve(tokens, mask, kwargs)
        if self.lender is not None:
            self.lender.end(order_of(kwargs), kwargs["req_id"])
        return loaded

    def _retrieve(self, tokens: Tokens, mask: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        tiers: dict[str, list[CacheEngineKey]] = self.lookup_pins.get(kwargs.get("req_id"), {})
        pinned = [key for keys in tiers.values() for key in keys]
        try:
            with self.token_database.reuse(pinned):
                loaded: torch.Tensor = super().retrieve(tokens, mask, **kwargs)
                return loaded
        except Exception as error:
            self.unfilled.add_load(error, kwargs, 0)
            return torch.zeros(len(tokens), dtype=torch.bool)

    def _borrow(self, borrower: Borrower, tokens: Tokens, kwargs: dict[str, Any]) -> torch.Tensor:
        """Load what the first rank has fetched of a request."""
        try:
            objs, starts, ends = borrower.borrow(order_of(kwargs), kwargs["req_id"])
            try:
                if objs:
                    self.gpu_connector.batched_to_gpu(objs, starts, ends, **kwargs)
            finally:
                for obj in objs:
                    obj.ref_count_down()
        except Exception as error:
            self.unfilled.add_load(error, kwargs, 0)
            return torch.zeros(len(tokens), dtype=torch.bool)
        return loaded_tokens(len(tokens), starts, ends)

    def retrieve_layer(self, tokens: Tokens, mask: Any, **kwargs: Any) -> Layers:
        """Load a request's chunks layer by layer; yields once more than the model has layers.

        Raises nothing, and goes on to its end when LMCache finds less than it promised.
        """
        skipped = len(tokens) - int(mask.sum())
        load: Layers | None
        try:
            load, (_, ends) = self._first_group(tokens, mask, kwargs)
            end = ends[-1] if ends else skipped
            if end < len(tokens):
                missing = f"{end - skipped} of {len(tokens) - skipped} tokens"
                self.unfilled.add_load(missing, kwargs, end)
            if end == skipped:
                load = None  # LMCache's own generator fails at its end
        except Exception as error:
            self.unfilled.add_load(error, kwargs, skipped)
            load = None
        yield None
        nothing = torch.zeros(len(tokens), dtype=torch.bool)

        def failed(error: Exception) -> None:
            self.unfilled.add_load(error, kwargs, skipped)

        yield from load_calls(load, self.gpu_connector.groups, nothing, failed)

    def _first_group(
        self, tokens: Tokens, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Layers, Spans]:
        """Begin a load; the generator, and the chunks that are there."""
        if self.borrower is not None:
            return borrow_layers(self.borrower, self.gpu_connector, kwargs)
        if self.lender is None:
            load, spans, _ = self._begin_layers(tokens, mask, kwargs)
            return load, spans
        self.lender.settle()
        try:
            load, spans, layers = self._begin_layers(tokens, mask, kwargs)
            lend_layers(self.lender, kwargs, layers, spans)
        finally:
            self.lender.end(order_of(kwargs), name_of(kwargs))
        return load, spans

    def _begin_layers(
        self, tokens: Tokens, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Layers, Spans, Sequence[Future[Any]]]:
        """Begin LMCache's own load; and where it is lent, all of it is being fetched."""
        with self._beginning:
            self.gpu_connector.spans = (), ()
            self.storage_manager.layers = None if self.lender is None else ()
            load = super().retrieve_layer(tokens, mask, **kwargs)
            try:
                next(load)  # the count that LMCache before 0.5.7 yields here is not needed
            except AssertionError:  # chunks in several tiers; LMCache loads from one
                everywhere = self.retrieve_locations
                self.retrieve_locations = [self._best_tier(tokens, mask)]
                try:
                    load = super().retrieve_layer(tokens, mask, **kwargs)
                    next(load)
                finally:
                    self.retrieve_locations = everywhere
            return load, self.gpu_connector.spans, self.storage_manager.layers or ()

    def _best_tier(self, tokens: Tokens, mask: Any) -> str:
        """Return the name of the tier that holds most of the prefix."""
        keys = [key.split_layers(self.num_layers)[0] for key in self._keys(tokens, mask)]
        lengths: dict[str, int] = dict.fromkeys(self.storage_manager.storage_backends, 0)
        for tier in lengths:
            for key in keys:
                if not self.storage_manager.contains(key, [tier]):
                    break
                lengths[tier] += 1
        return max(lengths, key=lambda tier: lengths[tier])

    # Stores

    def store(self, *args: Any, **kwargs: Any) -> None:
        """Store a request's chunks; raises nothing. An error comes before one is published.

        A rank that borrows stores nothing: the first one holds the same.
        """
        if self.borrower is not None:
            return
        self.settle()
        try:
            super().store(*args, **kwargs)
        except Exception as error:
            log_failure(STORE_CPU, _LEFT_OUT, error)

    def store_layer(self, tokens: Tokens, mask: Any = None, **kwargs: Any) -> Layers:
        """Store a request's chunks layer by layer; yields once more than the model has layers.

        Raises nothing. An error may come when some layers are published: these are taken back. A
        rank that borrows stores nothing, see `store`.
        """
        self.settle()
        store: Layers | None = None
        if self.borrower is None:
            store = super().store_layer(tokens, mask=mask, **kwargs)

        def failed(error: Exception) -> None:
            log_failure(STORE_CPU, _LEFT_OUT, error)
            self.take_back(tokens, mask)

        yield from store_calls(store, self.gpu_connector.groups, failed)

    def take_back(self, tokens: Tokens, mask: Any = None) -> None:
        """Remove chunks that miss layers: LMCache asks for the first alone and would keep them."""
        if self.borrower is not None:
            return
        if (in_flight := self.gpu_connector.overlap) is not None:
            in_flight.drain()  # what is complete only now is to be published first
        for key in self._keys(tokens, mask):
            layers = key.split_layers(self.num_layers)
            if not all(self.storage_manager.contains(layer) for layer in layers):
                for layer in layers:
                    self.storage_manager.remove(layer)

    def settle(self) -> None:
        """Let go of what other ranks have loaded from this one's CPU tier."""
        if self.lender is not None:
            self.lender.settle()

    def _keys(self, tokens: Tokens, mask: Any) -> list[CacheEngineKey]:
        chunks = self.token_database.process_tokens(tokens=tokens, mask=mask)
        return [key for _, _, key in chunks]


_LEFT_OUT = "A store failed and is left out"
