"""Adapters as LMCache's server makes them."""

from __future__ import annotations

import pytest


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
