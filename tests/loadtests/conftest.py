"""The stub server as a fixture."""

from __future__ import annotations

import pytest
from stub_process import stub_server

from loadtests import comparison


@pytest.fixture
def stub():
    """A stub server with the usual delays: 50 ms, then 10 ms per token."""
    with stub_server() as server:
        yield server


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not look at intervals, whose drawing is most of a comparison's time."""
    monkeypatch.setattr(comparison, "RESAMPLES", 100)
