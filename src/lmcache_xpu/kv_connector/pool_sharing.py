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
from lmcache_xpu.transfer.shared_memory import SharedMemory

__all__ = ["PoolSharing"]

SILENCE = timedelta(minutes=5)  # of a rank that fetches, after which a load has failed


class PoolSharing:
    """Gives ranks that hold the same one CPU tier. Each of them makes one, at the same time.

    That is when an engine starts. A rank that fails later is seen by its connections, which end
    with it: to make them anew the others would wait for it.

    Args:
        shard: of this rank.
    """

    def __init__(self, shard: Shard) -> None:
        ranks = get_tp_group()
        members = ranks.ranks[shard.first_rank : shard.first_rank + shard.copies]
        self._shard = shard
        self._number = ranks.rank_in_group - shard.first_rank
        self._groups = [
            distributed.new_group(
                members, timeout=SILENCE, backend="gloo", use_local_synchronization=True
            )
            for _ in range(ORDERS)
        ]
        self._channels = [GroupChannel(group, members[0]) for group in self._groups]
        for group in self._groups:  # connections are made with the first exchange
            distributed.barrier(group)

    def share(self, engine: Any) -> None:
        """Let the ranks use the first one's CPU tier from now on. Each of them calls it, and waits.

        Args:
            engine: LMCache's, with its tiers open.

        Raises:
            SettingsError: the first one's memory can't be mapped by all.
            RuntimeError: one of them has ended.
        """
        error = self._lend(engine) if self._shard.stores else self._borrow(engine)
        errors: list[str] = [""] * self._shard.copies
        distributed.all_gather_object(errors, error, group=self._groups[0])
        if any(errors):
            raise SettingsError(
                f"a CPU tier that other ranks can't map: {max(errors)}",
                "ranks of one user, in one container",
                "Let each rank have a tier of its own: xpu.share_cpu_tier false in LMCache's "
                "extra_config.",
            )

    def _lend(self, engine: Any) -> str:
        memory = pool(engine)
        shared = None if memory is None else SharedMemory.made_at(memory.data_ptr())
        assert shared is not None, "LMCache's pool is not of this package's making"
        ledger = SharedMemory.make(LEDGER_BYTES)
        self._channels[0].send((shared.place, ledger.place))
        engine.lender = Lender(self._channels, shared, ledger, self._shard.copies - 1)
        engine.gpu_connector.lender = engine.lender
        return ""

    def _borrow(self, engine: Any) -> str:
        places = self._channels[0].receive()
        try:
            shared, ledger = (SharedMemory.open(place) for place in places)
        except OSError as failure:
            return str(failure)
        engine.borrower = Borrower(self._channels, shared, ledger, self._number - 1)
        return ""
