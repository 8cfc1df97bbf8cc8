"""Addresses of all 64 bits as a tensor's numbers."""

from __future__ import annotations

import pytest
import torch

from lmcache_xpu.transfer.addresses import address_table

ADDRESSES = [0, 16, 2**47 - 1, 2**63 - 1, 2**63, 0xFFFF_D556_B640_0000, 2**64 - 1]


def test_every_address_keeps_its_bits():
    table = address_table(ADDRESSES)
    assert table.dtype == torch.int64
    assert table.view(torch.uint64).tolist() == ADDRESSES
    assert [number % 2**64 for number in table.tolist()] == ADDRESSES


def test_no_addresses_are_an_empty_table():
    assert address_table([]).shape == (0,)
    assert address_table([]).dtype == torch.int64


@pytest.mark.parametrize("number", [-1, 2**64])
def test_what_is_no_address_is_an_error(number: int):
    with pytest.raises(OverflowError):
        address_table([number])
