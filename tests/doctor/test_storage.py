"""Checks of the disk tier and the shared tier."""

from __future__ import annotations

import pytest
from support.checks import GIB, load, said
from support.servers import PASSWORD, Server, needs_server

from lmcache_xpu.doctor import storage


@pytest.fixture
def server():
    server = Server()
    server.start()
    yield server
    server.stop()
    server.client.close()


def test_a_disk_is_measured_and_left_as_it_was(machine, root, monkeypatch):
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 0)
    check = storage.check_disk_tier(machine(), load(disk_path=root / "data", disk_gib=1))
    assert said(check, "ok", "ext4", "MB/s")
    assert not any((root / "data").iterdir())
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 1e15)
    check = storage.check_disk_tier(machine(), load(disk_path=root / "data", disk_gib=1))
    assert said(check, "warn", "SSD")


def test_a_disk_that_is_too_small(machine, root):
    settings = load(disk_path=root / "data", disk_gib=1e6, tensor_parallel=2)
    assert said(storage.check_disk_tier(machine(), settings), "warn", "2e+06", "Lower disk_gib")


def test_a_disk_tier_that_would_be_forgotten(machine, root):
    settings = load(disk_path=root / "elsewhere", disk_gib=1)
    assert said(storage.check_disk_tier(machine(), settings), "warn", "container's own layer")


def test_a_disk_path_that_can_not_be_written(machine, root):
    (root / "data/file").touch()
    settings = load(disk_path=root / "data/file", disk_gib=1)
    assert said(storage.check_disk_tier(machine(), settings), "fail", "can't be written")


def test_tiers_that_are_off(machine):
    assert storage.check_disk_tier(machine(), load()).outcome == "skip"
    assert storage.check_shared_tier(load()).outcome == "skip"


def test_a_shared_tier_that_is_away():
    check = storage.check_shared_tier(load(remote_url="redis://127.0.0.1:1"))
    assert said(check, "warn", "refused", "remote_password")


@needs_server
def test_what_a_shared_tier_does_when_it_is_full(server):
    def check():
        return storage.check_shared_tier(load(remote_url=server.url, remote_password=PASSWORD))

    def policy(name):
        server.client.config_set("maxmemory-policy", name)

    assert said(check(), "warn", "no maxmemory, noeviction", "maxmemory-policy allkeys-lru")
    server.client.config_set("maxmemory", 2 * GIB)
    for drops_none in ("noeviction", "volatile-lru", "volatile-ttl"):
        policy(drops_none)
        assert said(check(), "warn", f"2.00 GiB, {drops_none}", "set maxmemory-policy allkeys-lru")
    for name in ("allkeys-lru", "allkeys-lfu", "allkeys-random"):
        policy(name)
        assert said(check(), "ok", f"answers, maxmemory 2.00 GiB, {name}")
    server.client.acl_setuser("default", enabled=True, commands=["-config"])
    assert said(check(), "ok", "2.00 GiB, allkeys-random")  # as where a provider keeps it
    server.client.acl_setuser("default", enabled=True, commands=["-info"])
    assert said(check(), "ok", "answers; its maxmemory can't be read")


@needs_server
def test_a_shared_tier_with_another_password(server):
    check = storage.check_shared_tier(load(remote_url=server.url, remote_password="wrong"))
    assert said(check, "warn", "password", "remote_password")
