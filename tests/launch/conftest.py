"""What starts of engines share."""

from __future__ import annotations

import pytest

from lmcache_xpu.harness.engine_process import free_port


@pytest.fixture
def free():
    """A port that nobody listens on."""
    return free_port()
