"""Values of the shared tier that are not what was stored, and servers that take no writes."""

from __future__ import annotations

import json
import struct
import threading
import time

import pytest
import torch
from prometheus_client import REGISTRY
from support.server_disk import OBJECT, content, make_key
from support.servers import needs_server

from lmcache_xpu import tiers
from lmcache_xpu.tiers import shared_l2, shared_values
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, identify_chunk, pack_chunk

pytestmark = needs_server


def failed(direction, reason):
    labels = {"direction": direction, "tier": "shared", "reason": reason}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels) or 0.0


def whole(engine, number):
    """Whether the object comes back, as it was stored."""
    return engine.load([number]) == [number]


def flipped(at):
    def flip(value, _):
        value = bytearray(value)
        value[at] ^= 1
        return bytes(value)

    return flip


def of_before(value, _):
    """As versions up to 0.1 had it: length of the layout, layout, bytes; no checksum."""
    text = json.dumps(["KV_2LTD", [[2, 2, 16, 128]], ["bfloat16"]]).encode()
    return struct.pack("<I", len(text)) + text + value[HEADER_BYTES:]


def with_meta(meta):
    """An intact value that says something else of its bytes."""
    return lambda value, name: pack_chunk(name, meta, memoryview(value)[HEADER_BYTES:])


DAMAGES = {
    "cut": lambda value, _: value[:-1],
    "cut in the header": lambda value, _: value[:100],
    "without its bytes": lambda value, _: value[:HEADER_BYTES],
    "longer": lambda value, _: value + b"\0",
    "empty": lambda *_: b"",
    "3 bytes": lambda *_: b"abc",
    "bad length": lambda value, _: struct.pack("<I", 2**32 - 1) + value[4:],
    "bad JSON": lambda *_: struct.pack("<I", 3) + b"{]}" + bytes(OBJECT),
    "bad UTF-8": lambda *_: struct.pack("<I", 3) + b"\xff\xfe\xfd" + bytes(OBJECT),
    "bit in the checksum": flipped(16),
    "bit in the layout": flipped(200),
    "bit in the payload": flipped(-OBJECT // 2),
    "bit in the last byte": flipped(-1),
    "of a version before": of_before,
    "of another chunk": lambda value, _: pack_chunk("x", "[]", memoryview(value)[HEADER_BYTES:]),
    "layout that is no JSON": with_meta("{]}"),
    "layout of another kind": with_meta('{"a": 1}'),
    "layout of no format": with_meta('["NONE", [[2, 2, 16, 128]], ["bfloat16"]]'),
    "layout of no dtype": with_meta('["KV_2LTD", [[2, 2, 16, 128]], ["add"]]'),
    "layout of another size": with_meta('["KV_2LTD", [[2, 2, 8, 128]], ["bfloat16"]]'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_value_is_a_miss_and_heals(engine, server, damage):
    first = engine()
    first.store([1])
    [name] = server.client.keys()
    damaged = damage(server.client.get(name), name.decode())
    server.client.set(name, damaged)
    before = failed("load", "corrupt")
    assert not whole(first, 1)
    assert failed("load", "corrupt") == before + 1
    assert first.look_up([1]) == []  # so the next one with this prefix is not promised it
    first.store([1])
    assert first.look_up([1]) == [1]
    assert whole(first, 1)
    assert failed("load", "corrupt") == before + 1


def test_damage_costs_no_memory(engine, server):
    first = engine()
    first.store([1])
    [name] = server.client.keys()
    small = engine(l1_objects=4)
    for _ in range(8):
        server.client.set(name, b"damaged")
        assert not whole(small, 1)
    first.store([1])
    assert whole(small, 1)


def test_a_value_of_a_version_before_has_another_name(engine, server):
    """Neither version finds the other's, so a rolling update damages nothing."""
    first = engine()
    first.store([1])
    [name] = server.client.keys()
    assert name.startswith(b"kv3@")
    server.client.rename(name, name.replace(b"kv3@", b"kv2@"))
    assert first.look_up([1]) == []
    first.store([1])
    assert first.look_up([1]) == [1]
    assert len(server.client.keys()) == 2


def test_a_value_is_a_chunk_file(engine, server, tmp_path):
    """What the disk tier checks is checked here: one format, and one checksum."""
    engine().store([1])
    [name] = server.client.keys()
    (file := tmp_path / "chunk").write_bytes(server.client.get(name))
    key, info = identify_chunk(file)
    assert key == name.decode()
    assert info.payload_bytes == OBJECT
    assert ChunkLayout.parse(info.meta).size == OBJECT


def test_a_full_server_goes_on_being_read(engine, server, monkeypatch, caplog):
    monkeypatch.setattr(tiers.LOGGERS["shared"], "propagate", True)
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.5)
    first = engine()
    first.store([1, 2])
    server.fill()
    before = failed("store", "full"), failed("store", "server")
    sent = server.client.info()["total_net_input_bytes"]
    first.store([3])
    first.store(range(4, 12))
    assert failed("store", "full") == before[0] + 9
    assert failed("store", "server") == before[1]
    assert server.client.info()["total_net_input_bytes"] - sent < 3 * OBJECT  # tried once
    assert caplog.text.count("shared tier: it takes no writes: command not allowed") == 1
    assert "left alone" not in caplog.text
    assert first.look_up([1, 2]) == [1, 2]
    assert whole(first, 1)
    assert first.look_up([3]) == []
    server.client.config_set("maxmemory", 0)
    time.sleep(0.6)
    first.store([3])
    assert whole(first, 3)


def test_damaged_values_in_a_full_server_heal(engine, server, monkeypatch):
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.1)
    first = engine()
    first.store(range(32))
    for name in server.client.scan_iter():
        server.client.setrange(name, OBJECT, b"damage")
    server.fill()
    assert not any(whole(first, number) for number in range(32))
    assert not server.client.keys()
    first.store([1])  # where the damaged ones were
    assert whole(first, 1)


REFUSALS = {
    "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
    "NOPERM": (("ACL", "SETUSER", "default", "-set"), ("ACL", "SETUSER", "default", "+set")),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_refuses_writes_goes_on_being_read(engine, server, monkeypatch, refusal):
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.5)
    first = engine()
    first.store([1])
    refuse, allow = REFUSALS[refusal]
    server.client.execute_command(*refuse)
    refused_and_read(first)
    server.client.execute_command(*allow)
    time.sleep(0.6)
    first.store([2])
    assert whole(first, 2)


def test_a_server_that_can_not_save_goes_on_being_read(engine, server, monkeypatch):
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.5)
    server.stop()
    server.start("--save", "3600 1", "--dir", "/proc")  # where nobody can make a file
    first = engine()
    first.store([1])
    server.client.bgsave()
    while server.client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.01)
    refused_and_read(first)


def refused_and_read(engine):
    before = failed("store", "refused"), failed("store", "server")
    engine.store([2, 3])
    assert failed("store", "refused") == before[0] + 2
    assert failed("store", "server") == before[1]
    assert engine.look_up([1]) == [1]
    assert whole(engine, 1)
    assert engine.look_up([2]) == []


def test_damage_that_may_not_be_deleted_is_a_miss(engine, server):
    first = engine()
    first.store([1])
    [name] = server.client.keys()
    first.store([2])
    server.client.set(name, b"damaged")
    server.client.execute_command("ACL", "SETUSER", "default", "-del")
    assert [whole(first, 1) for _ in range(3)] == [False] * 3
    assert whole(first, 2)


# Memory that LMCache takes back


def test_memory_taken_back_while_it_is_sent_is_not_stored(engine, server, monkeypatch):
    first = engine()
    objects = first.filled([0])
    pack = shared_values.pack_chunk

    def free_and_pack(*args):
        first.l1.free(list(objects))
        return pack(*args)

    monkeypatch.setattr(shared_values, "pack_chunk", free_and_pack)
    before = failed("store", "behind")
    assert not first.submit_store([make_key(0)], objects).is_successful()
    assert failed("store", "behind") == before + 1
    assert not server.client.keys()


def test_memory_taken_back_during_a_load_is_not_written(engine, monkeypatch):
    first = engine()
    first.store([0])
    objects = first.allocate()
    unpack = shared_values.unpack_chunk

    def free_and_reuse(*args):
        first.l1.free(list(objects))
        [again] = first.allocate()
        assert again.data_ptr == objects[0].data_ptr
        again.tensor.copy_(content(9))
        return unpack(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shared_values, "unpack_chunk", free_and_reuse)
        assert first.load([0], objects=list(objects)) == []
    assert torch.equal(first.lent[-1].tensor, content(9))
    assert first.load([0]) == [0]  # the value was not at fault


def test_memory_of_a_load_that_ended_late_is_not_written(engine, monkeypatch):
    monkeypatch.setattr(shared_l2, "LOAD_S", 0.1)
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.1)
    first = engine()
    first.store([0])
    objects = first.allocate()
    unpack, ended, done = shared_values.unpack_chunk, threading.Event(), threading.Event()

    def unpack_late(*args):
        assert ended.wait(10)
        done.set()
        return unpack(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shared_values, "unpack_chunk", unpack_late)
        task = first.tier.submit_load_task([make_key(0)], objects)
        fd = first.tier.get_load_event_fd()
        assert not first.wait(fd, lambda: first.tier.query_load_result(task)).test(0)
        objects[0].tensor.copy_(content(9))  # it is still LMCache's, and perhaps another's
        ended.set()
        assert done.wait(10)
        time.sleep(0.2)
    assert torch.equal(objects[0].tensor, content(9))
    assert first.tier.query_load_result(task) is None
    assert whole(first, 0)
