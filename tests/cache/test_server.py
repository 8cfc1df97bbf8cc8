from __future__ import annotations

import pytest
import torch
from support.lending import POOL, Client

from lmcache_xpu.cache.server import LentMemory
from lmcache_xpu.errors import HostMemoryError, SettingsError

CPU = torch.device("cpu")


@pytest.fixture
def client():
    client = Client()
    yield client
    client.close()


def test_what_is_written_is_the_servers_memory(client):
    memory = LentMemory.of_server(f"/{client.name}", POOL, CPU)
    memory.slot(128, 64, 64).fill_(7)
    assert client.path.read_bytes()[120:200] == bytes(8) + bytes([7]) * 64 + bytes(8)


def test_memory_stays_when_its_server_has_ended_and_is_not_that_of_the_next_one(client):
    memory = LentMemory.of_server(client.name, POOL, CPU)
    slot = memory.slot(0, 64, 64)
    slot.fill_(7)
    assert memory.is_at(client.name, POOL)
    client.path.unlink()
    assert not memory.is_at(client.name, POOL)
    client.path.write_bytes(bytes(POOL))
    assert not memory.is_at(client.name, POOL)
    memory.release()
    del memory
    assert slot.sum() == 7 * 64


@pytest.mark.parametrize(
    ("offset", "length"), [(POOL - 32, 64), (-64, 64), (0, 32)], ids=["behind", "before", "size"]
)
def test_an_object_that_is_no_part_of_it_is_refused(client, offset, length):
    with pytest.raises(HostMemoryError):
        LentMemory.of_server(client.name, POOL, CPU).slot(offset, length, 64)


def test_memory_that_is_not_here_is_refused(client):
    with pytest.raises(SettingsError, match="the same /dev/shm"):
        LentMemory.of_server("nobody-lends-this", POOL, CPU)
    with pytest.raises(SettingsError, match=f"{2 * POOL} or more"):
        LentMemory.of_server(client.name, 2 * POOL, CPU)
    with pytest.raises(SettingsError, match="without slashes"):
        LentMemory.of_server("../etc/passwd", POOL, CPU)
