"""Ranks of engines on one directory."""

from __future__ import annotations

import pytest
from support.shards import KV_HEADS, rank_metadata


@pytest.fixture
def rank(engines):
    def start(number, ranks, *, heads=KV_HEADS, divisible=True, **settings):
        metadata = rank_metadata(number, ranks, heads, divisible=divisible)
        return engines(metadata=metadata, **{"pool_chunks": 512, **settings})

    return start


@pytest.fixture
def ranks(rank):
    """All ranks of an engine."""
    return lambda size, **options: [rank(number, size, **options) for number in range(size)]
