"""The stub server as a fixture."""

from __future__ import annotations

import pytest
from stub_process import stub_server


@pytest.fixture
def stub():
    """A stub server with the usual delays: 50 ms, then 10 ms per token."""
    with stub_server() as server:
        yield server
