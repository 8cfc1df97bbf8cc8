"""LMCache's look-ups of one scheduler, with keys of their own for salted requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.cache_salt import CacheSalts

__all__ = ["LookupClient"]


class LookupClient(LMCacheLookupClient):  # type: ignore[misc]  # untyped base
    """Asks the workers how many tokens of a prompt can be loaded."""

    salts: CacheSalts | None = None  # of the scheduler's requests

    def lookup(
        self,
        token_ids: Sequence[int],
        lookup_id: str,
        request_configs: dict[str, Any] | None = None,
    ) -> int | None:
        """Return the number of tokens that can be loaded, of a prefix of these.

        Args:
            token_ids: of the request.
            lookup_id: its name.
            request_configs: LMCache's options of the request.
        """
        if self.salts is not None:
            if self.salts.computes(lookup_id):
                return 0
            token_ids = self.salts.look_up(lookup_id, token_ids)
        count: int | None = super().lookup(token_ids, lookup_id, request_configs)
        return count
