"""What a worker tells the server of its KV cache: how large the objects of its first group are.

The server allocates them by numbers of layers, tokens and elements. It is told of one layer of one
token of bytes, so that the order of bytes in an object is this package's own. Of several groups
this package's module is told, see `server_module`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_xpu.cache.protocol import Cache
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.versions.lmcache_server import RegisterEngineDrivenContextPayload

__all__ = ["payload"]


def payload(client: Cache, groups: Sequence[GroupCopies]) -> Any:
    """Return LMCache's registration of a worker."""
    return RegisterEngineDrivenContextPayload(
        instance_id=client.instance_id,
        model_name=client.scope.model_name,
        world_size=client.scope.world_size,
        block_size=groups[0].group.block_tokens,
        num_layers=1,
        hidden_dim_size=groups[0].object_bytes,
        dtype_str="uint8",
        use_mla=True,  # one plane
        num_physical_slots=1,
    )
