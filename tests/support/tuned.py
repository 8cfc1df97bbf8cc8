"""Other numbers in the tuning table, so that small requests take a large one's way."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from unittest import mock

from lmcache_xpu.transfer import tuning


def tuned(**numbers: int) -> AbstractContextManager[object]:
    """A context in which every device has these numbers; the others stay."""
    rows = {
        device_type: dataclasses.replace(row, **numbers)
        for device_type, row in tuning.TUNINGS.items()
    }
    return mock.patch.dict(tuning.TUNINGS, rows)
