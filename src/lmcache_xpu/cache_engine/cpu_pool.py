"""LMCache's CPU tier of one worker, which can tell of each chunk that comes or goes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.storage_backend import local_cpu_backend

from lmcache_xpu.tiers.prompts import Prompts
from lmcache_xpu.tiers.residency import CPU, chunk_name

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

    from lmcache_xpu.tiers.residency import Residency

__all__ = ["LocalCPUBackend", "reporting"]


class LocalCPUBackend(local_cpu_backend.LocalCPUBackend):  # type: ignore[misc]  # untyped base
    """LMCache's CPU tier. It bears LMCache's name, which is the tier's name in logs."""

    hot_cache: Any  # LMCache's index, a kind of `dict`
    keys_in_request: list[CacheEngineKey]  # looked up and pinned, touched after the look-up

    @cached_property
    def prompts(self) -> Prompts:
        """What look-ups have missed; the disk tier stores in its order, too."""
        return Prompts()

    def watch(self, residency: Residency) -> None:
        """Report chunks from now on. Call it before the first one is stored.

        LMCache evicts in several ways; all of them change its index, and nothing else does.
        """

        def changed(key: Any, present: bool) -> None:
            residency.changed(CPU, chunk_name(key.chunk_hash), present, getattr(key, "layer_id", 0))

        assert not self.hot_cache, "chunks before the tiers were up"
        self.hot_cache = reporting(type(self.hot_cache), changed)

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether a chunk is here; with `pin`, it stays until LMCache unpins it.

        For the first layer of a chunk, asked before a layerwise store or load, all layers must be
        here: LMCache evicts them one by one.
        """
        if not pin and isinstance(key, LayerCacheEngineKey) and key.layer_id == 0:
            with self.cpu_lock:
                return all(map(self.hot_cache.__contains__, self._layers(key)))
        contains: bool = super().contains(key, pin)
        return contains

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Return how many of `keys` are here, up to the first that is not; pinned if `pin`.

        LMCache's asks for one after another, and for each of them twice. The layers of one chunk
        count together or not at all: LMCache uses no part of them, and would not unpin it.
        """
        with self.cpu_lock:
            objs = list(_until_missing(map(self.hot_cache.get, keys)))
            if len(objs) < len(keys) and isinstance(keys[0], LayerCacheEngineKey):
                return 0
            self.prompts.missed(keys, len(objs))
            if pin:
                for obj in objs:
                    obj.pin()
                self.keys_in_request.extend(keys[: len(objs)])
        return len(objs)

    def batched_submit_put_task(self, keys: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """Take chunks in. What is evicted next of their prompt is its end.

        LMCache evicts the chunk first that came first, and that is the head of a prompt, without
        which the rest is of no use.
        """
        answer = super().batched_submit_put_task(keys, *arguments, **options)
        if isinstance(self.hot_cache, OrderedDict) and keys:
            with self.cpu_lock:
                looked_up = self.prompts.find(keys[0])
                prompt = looked_up[0].keys if looked_up else keys
                for key in filter(self.hot_cache.__contains__, reversed(prompt)):
                    self.hot_cache.move_to_end(key)
        return answer

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Return the chunks of `keys`, each with one reference more; None for one not here.

        LMCache's asks for one after another, and for each of them twice: hundreds wait for this.
        """
        with self.cpu_lock:
            objs = list(map(self.hot_cache.get, keys))
            for obj in filter(None, objs):
                obj.ref_count_up()
        return objs

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Return the chunks of `keys`, each with one reference more.

        Without a `transfer_spec` this is one layer of a layerwise load: it ends before the first
        chunk that is not here, as the disk's does, and each chunk gets a pin as well.
        `retrieve_layer` unpins what it was handed over, as loads of other tiers need it. Of chunks
        that are here it would take back the pins of look-ups, other requests' too, and they could
        be evicted before they are loaded.
        """
        if transfer_spec is not None:
            return list(await super().batched_get_non_blocking(lookup_id, keys, transfer_spec))
        with self.cpu_lock:
            objs = list(_until_missing(map(self.hot_cache.get, keys)))
            for obj in objs:
                obj.ref_count_up()
                obj.pin()
        return objs

    def _layers(self, key: CacheEngineKey) -> list[CacheEngineKey]:
        layers: list[CacheEngineKey] = key.split_layers(self.metadata.kv_shape[0])
        return layers


def _until_missing(objs: Iterable[Any]) -> Iterator[Any]:
    """Yield the first objects, up to one that is None."""
    return itertools.takewhile(lambda obj: obj is not None, objs)


def reporting(kind: type, changed: Callable[[Any, bool], None]) -> Any:
    """Return an empty mapping that reports each key that comes or goes.

    Args:
        kind: the class of LMCache's index, a kind of `dict`; it depends on `cache_policy`.
        changed: gets a key, and whether it is there now. Must not change the mapping.
    """

    class Reporting(kind):  # type: ignore[misc]  # of LMCache's choice
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            changed(key, True)

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key)
            changed(key, False)

        def pop(self, key: Any, *default: Any) -> Any:
            value = super().pop(key, *default)
            changed(key, False)
            return value

    return Reporting()
