"""Ranks that hold the same are given the CPU tier of the first one; see `loans`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed
from vllm.distributed.parallel_state import get_tp_group

from lmcache_xpu.cache_engine.health import pool
from lmcache_xpu.cache_engine.loans import LEDGER_BYTES, ORDERS, Borrower, Lender
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector.rank_group import GroupChannel
from lmcache_xpu.tiers.shard import Shard
from lmcache_xpu.transfer.pool_memory import SharedMemory

__all__ = ["share_pool"]

SILENCE = timedelta(minutes=5)  # of a rank that fetches, after which a load has failed


def share_pool(engine: Any, shard: Shard) -> None:
    """Let ranks that hold the same use one CPU tier from now on. Each of them calls it, and waits.

    Not when an engine starts: a rank whose start fails answers vLLM and stays, and the others would
    wait for it.

    Args:
        engine: LMCache's, with its tiers open and the engine's KV cache registered.
        shard: of this rank.

    Raises:
        SettingsError: the first one's memory can't be mapped by all.
    """
    ranks = get_tp_group()
    members = ranks.ranks[shard.first_rank : shard.first_rank + shard.copies]
    groups = [
        distributed.new_group(
            members, timeout=SILENCE, backend="gloo", use_local_synchronization=True
        )
        for _ in range(ORDERS)
    ]
    channels = [GroupChannel(group, members[0]) for group in groups]
    if shard.stores:
        error = _lend(engine, channels, shard.copies - 1)
    else:
        error = _borrow(engine, channels, ranks.rank_in_group - shard.first_rank - 1)
    errors: list[str] = [""] * shard.copies
    distributed.all_gather_object(errors, error, group=groups[0])
    if any(errors):
        raise SettingsError(
            f"a CPU tier that other ranks can't map: {max(errors)}",
            "ranks of one user, in one container",
            "Let each rank have a tier of its own: xpu.share_cpu_tier false in LMCache's "
            "extra_config.",
        )


def _lend(engine: Any, channels: list[GroupChannel], borrowers: int) -> str:
    memory = pool(engine)
    shared = None if memory is None else SharedMemory.made_at(memory.data_ptr())
    assert shared is not None, "LMCache's pool is not of this package's making"
    ledger = SharedMemory.make(LEDGER_BYTES)
    channels[0].send((shared.place, ledger.place))
    engine.lender = Lender(channels, shared, ledger, borrowers)
    engine.gpu_connector.lender = engine.lender
    return ""


def _borrow(engine: Any, channels: list[GroupChannel], number: int) -> str:
    places = channels[0].receive()
    try:
        shared, ledger = (SharedMemory.open(place) for place in places)
    except OSError as failure:
        return str(failure)
    engine.borrower = Borrower(channels, shared, ledger, number)
    engine.gpu_connector.pin(shared.tensor)
    return ""
