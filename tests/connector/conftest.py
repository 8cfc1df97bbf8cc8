"""What each test of the connector begins with."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected_garbage() -> Iterator[None]:
    """A half that was told of a request and of no step leaves garbage collection off."""
    yield
    gc.enable()
