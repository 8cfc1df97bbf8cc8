"""The tuning table: a row per device, and what must hold of each."""

from __future__ import annotations

import dataclasses

import pytest

from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.tuning import TUNINGS, Tuning, tuning_of


@pytest.mark.parametrize("device_type", TUNINGS)
def test_every_row_has_numbers_that_can_be_used(device_type: str):
    row = tuning_of(device_type)
    numbers = dataclasses.asdict(row)
    assert all(isinstance(number, int) and number > 0 for number in numbers.values())
    assert row.tile_words & (row.tile_words - 1) == 0
    assert row.staging_bytes >= SMALLEST_STAGING_BYTES
    assert 2 * row.buffer_bytes <= row.staging_bytes
    assert row.direct_bytes <= row.direct_bytes_idle


def test_a_device_without_a_row_is_tuned_as_an_intel_gpu():
    assert tuning_of("hpu") is tuning_of("xpu")


def test_every_number_is_explained():
    words = (Tuning.__doc__ or "").split()
    for field in dataclasses.fields(Tuning):
        assert f"{field.name}:" in words
