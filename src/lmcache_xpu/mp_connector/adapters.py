"""What LMCache's adapters of a scheduler and of a worker are made with, to make ours alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zmq

__all__ = ["SERVER_URLS", "arguments_of"]

SERVER_URLS = "lmcache.mp.server_urls"  # LMCache's option; here always one URL


def arguments_of(stock: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """End an adapter of LMCache's, and return the arguments of another one in its place.

    Args:
        stock: LMCache's.
        options: of the connector, and LMCache's.
    """
    stock.shutdown()
    return {
        "context": zmq.Context.instance(),
        "model_name": stock.model_name,
        "vllm_block_size": stock.lmcache_tokens_per_chunk // stock.blocks_in_chunk,
        "parallel_strategy": stock.parallel_strategy,
        "extra_config": options,
    }
