"""Ranks of engines on one directory, and adapters as LMCache's server makes them."""

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


@pytest.fixture
def adapters(tmp_path):
    from support.server_disk import Adapter  # takes seconds, which other tests need not wait

    opened = []

    def start(**settings):
        opened.append(Adapter(settings.pop("path", tmp_path / "kv"), **settings))
        return opened[-1]

    yield start
    for adapter in opened:
        adapter.close()
