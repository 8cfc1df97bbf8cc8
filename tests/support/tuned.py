"""Other numbers of the data path, so that small requests take a large one's way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from lmcache_xpu.transfer.tuning import TUNING


def tuned(**numbers: int) -> AbstractContextManager[object]:
    """A context with these numbers; the others stay."""
    return mock.patch.multiple(TUNING, **numbers)
