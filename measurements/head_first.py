"""The eviction that LMCache's CPU tier had: of a prompt the beginning goes first.

vLLM imports this in the engine's process where `--worker-extension-cls head_first.Worker` names it.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.eviction_policy import LRUEvictionPolicy

_created, _touched = LRUEvictionPolicy.on_keys_created, LRUEvictionPolicy.on_keys_touched


def _create(policy: Any, keys: list[Any]) -> None:
    _created(policy, keys[::-1])


def _touch(policy: Any, keys: list[Any]) -> None:
    _touched(policy, keys[::-1])


# LMCache walks through a list from its end, so a list that is turned around loses its
# beginning first.
LRUEvictionPolicy.on_keys_created, LRUEvictionPolicy.on_keys_touched = _create, _touch


class Worker:
    """Adds nothing to vLLM's worker."""
