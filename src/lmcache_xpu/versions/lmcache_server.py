"""What differs between versions of LMCache for clients of its server, and for modules in it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.transport.base import RequestClient


def key_tokens(tokens: Sequence[int]) -> Any:
    """Return tokens as keys have them: LMCache 0.5.7 packs each into four bytes."""
    return _packer()(tokens)


@cache
def _packer() -> Any:
    try:
        from lmcache.v1.multiprocess.token_codec import pack_token_ids
    except ImportError:
        return tuple
    return pack_token_ids


def make_key(tokens: Any, **fields: Any) -> IPCCacheServerKey:
    """Make LMCache's key of tokens that `key_tokens` returned; `fields` have LMCache's names."""
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    name = "token_bytes" if isinstance(tokens, bytes) else "token_ids"
    return IPCCacheServerKey(**{name: tokens}, **fields)


def chunk_tokens(client: RequestClient, alignment: int) -> Any:
    """Return LMCache's future of a server's tokens of a chunk; 0.5.7 rounds them to a multiple."""
    if hasattr(client, "negotiate_chunk_size"):
        return client.negotiate_chunk_size(alignment)
    return client.get_chunk_size()


def begin_prefetch(storage: Any, rows: Sequence[Any], *, in_memory: bool) -> Any:
    """Begin to look for objects in LMCache's storage manager, and to lock those that may be hit.

    LMCache 0.5.6 is told with the call where not to look, 0.5.7 in the request. `rows` are
    LMCache's keys, by KV cache group. `in_memory`: the result is there at once.
    """
    from lmcache.v1.distributed.api import PrefetchTaskSpec

    if not _has_memory_tags():
        return storage.submit_prefetch_task(PrefetchTaskSpec(list(rows)), skip_l2=in_memory)
    tags: Any = frozenset() if in_memory else None
    spec = PrefetchTaskSpec(list(rows), allowed_l2_memory_tags=tags)
    return storage.submit_prefetch_task(spec)


@cache  # asked with each look-up
def _has_memory_tags() -> bool:
    from lmcache.v1.distributed.api import PrefetchTaskSpec

    return "allowed_l2_memory_tags" in inspect.signature(PrefetchTaskSpec).parameters


def touch(storage: Any, keys: Sequence[Any]) -> None:
    """Count objects in memory as used now; LMCache 0.5.7 calls it otherwise."""
    named = "touch_l1_keys" if hasattr(storage, "touch_l1_keys") else "touch_cached_keys"
    getattr(storage, named)(list(keys))


def touch_tiers(storage: Any, keys: Sequence[Any]) -> None:
    """Count objects in other tiers as used now, also those that are only stored there soon."""
    for _, tier in storage.l2_adapters():
        if hasattr(tier, "submit_touch"):  # as LMCache's own have it from 0.5.7 on
            tier.submit_touch(list(keys))


def server_module_base() -> Any:
    """Return the class of the server's modules; older ones need none."""
    from lmcache.v1.multiprocess import engine_module

    return getattr(engine_module, "DiscoverableModule", object)
