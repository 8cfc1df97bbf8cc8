"""The shared tier under LMCache's own StorageManager: what its controllers make of it."""

from __future__ import annotations

from prometheus_client import REGISTRY
from support.server_disk import OBJECT
from support.servers import needs_server
from support.sharing import name_of
from support.until import until

from lmcache_xpu.tiers import shared_l2

pytestmark = needs_server


def loaded():
    """Bytes from the shared tier."""
    labels = {"direction": "load", "tier": "shared"}
    return REGISTRY.get_sample_value("lmcache_xpu_bytes_total", labels) or 0.0


def test_what_one_stored_is_a_hit_of_another(storages):
    first, second = storages(), storages()
    first.store(range(5))
    before = loaded()
    assert second.hit(range(7)) == 5
    assert loaded() - before == 5 * OBJECT
    assert second.hit(range(7)) == 5  # from memory now
    assert loaded() - before == 5 * OBJECT


def test_a_hit_ends_before_a_damaged_value_which_is_stored_again(storages, server):
    first, second = storages(), storages()
    first.store(range(5))
    server.client.setrange(name_of(3), 5000, b"damage")
    assert second.hit(range(5)) == 3
    assert not server.client.exists(name_of(3))
    first.clear()
    first.store(range(5))
    assert storages().hit(range(5)) == 5


def test_the_disk_is_asked_first(storages, tmp_path):
    both, shared = storages(disk=tmp_path / "kv"), storages()
    both.store(range(3))
    disk, _ = (adapter for _, adapter in both.manager.l2_adapters())
    until(lambda: len(disk._store) == 3)
    shared.store(range(3, 6))
    both.clear()
    before = loaded()
    assert both.hit(range(6)) == 6
    assert loaded() - before == 3 * OBJECT


def test_what_is_lent_to_a_queue_comes_back(storages, server, monkeypatch):
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.1)
    storage = storages()
    server.stop()
    for begin in range(0, 200, 10):
        storage.store(range(begin, begin + 10), wait=False)
        assert storage.hit(range(begin, begin + 12)) == 10
        storage.clear()  # which waits for what is lent
    server.start()
