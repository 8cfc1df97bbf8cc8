"""What is remembered of host memory. The copies themselves are tested with the stager."""

from __future__ import annotations

import torch

from lmcache_xpu.transfer.host_copies import HostCopies
from lmcache_xpu.transfer.tuning import tuning_of


def test_memory_that_comes_to_the_place_of_forgotten_memory_is_looked_at_anew():
    device, answers = torch.device("cpu"), [True, False]
    copies = HostCopies(device, 64, lambda *_: answers.pop(0))
    pool = torch.empty(tuning_of("cpu").pool_bytes, dtype=torch.uint8)
    assert copies.pinned([pool[:64]])
    assert copies.pinned([pool[64:]])  # remembered
    copies.forget(pool)
    assert not copies.pinned([pool[:64]])
    assert answers == []
