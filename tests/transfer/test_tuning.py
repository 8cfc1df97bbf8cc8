"""What must hold of the tuned numbers."""

from __future__ import annotations

import dataclasses

from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.tuning import TUNING


def test_the_numbers_can_be_used():
    numbers = dataclasses.asdict(TUNING)
    assert all(isinstance(number, int) and number > 0 for number in numbers.values())
    assert TUNING.tile_words & (TUNING.tile_words - 1) == 0
    assert TUNING.staging_bytes >= SMALLEST_STAGING_BYTES
    assert 2 * TUNING.buffer_bytes <= TUNING.staging_bytes
    assert TUNING.direct_bytes <= TUNING.direct_bytes_idle
