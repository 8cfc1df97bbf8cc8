"""LMCache's CPU tier tells of each chunk that comes or goes."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")
from support.kv_events import changes

from lmcache_xpu.cache_engine.cpu_pool import reporting
from lmcache_xpu.tiers.residency import CPU, Residency


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_lmcaches_index_tells_of_keys_however_they_come_and_go(policy):
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy

    seen: list[tuple[str, bool]] = []
    residency = Residency()
    index = reporting(
        type(get_cache_policy(policy).init_mutable_mapping()),
        lambda key, held: (seen.append((key, held)), residency.changed(CPU, key, held)),
    )
    index["a"] = index["b"] = index["c"] = 1
    del index["a"]
    assert index.pop("b") == 1
    assert index.pop("b", None) is None
    with pytest.raises(KeyError):
        index.pop("b")
    assert index.get("c") == 1
    assert residency.take() == [
        *changes(CPU, ["a", "b", "c"]),
        *changes(CPU, ["a", "b"], held=False),
    ]
    assert len(index) == 1
