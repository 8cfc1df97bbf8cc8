"""The shared tier against servers that are slow, and values that others have put there."""

from __future__ import annotations

import json
import socketserver
import struct
import threading
import time
import zlib
from contextlib import closing, contextmanager

import pytest
from prometheus_client import REGISTRY
from support import sharing
from support.server_disk import OBJECT, SHAPE
from support.servers import PASSWORD, Server, needs_server

from lmcache_xpu import tiers
from lmcache_xpu.tiers import PASSWORD_VARIABLE, shared_l2, shared_values
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, pack_chunk

LOOKUP_S = 0.1  # in place of a second, to be quick


def errors(direction, reason):
    labels = {"direction": direction, "tier": "shared", "reason": reason}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels) or 0.0


# A slow server


class Slow(socketserver.StreamRequestHandler):
    """Answers RESP commands one after another, each after a while; counts them."""

    def handle(self):
        self.server.connections += 1
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2])
            command = words[0].upper()
            if command in (b"TOUCH", b"GET", b"SET", b"DEL"):
                self.server.commands += 1
                if self.server.over.wait(self.server.delays_s[command.decode()]):
                    return
            try:
                for piece in self.server.answers.get(command.decode(), [b"+OK\r\n"]):
                    self.wfile.write(piece)
                    if self.server.over.wait(self.server.between_s):
                        return
            except OSError:
                return


@contextmanager
def slow_server(delay_s, **delays_s):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.connections, server.commands, server.over = 0, 0, threading.Event()
        server.delays_s = dict.fromkeys(("TOUCH", "GET", "SET", "DEL"), delay_s) | delays_s
        server.answers = {"TOUCH": [b":0\r\n"], "GET": [b"$-1\r\n"], "DEL": [b":0\r\n"]}
        server.between_s = 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


@contextmanager
def engine_of(server):
    with closing(sharing.Engine(server.server_address[1])) as engine:
        yield engine


@pytest.fixture
def quick(monkeypatch):
    """Where a budget runs out. A good server has all of it: this machine may be busy."""
    monkeypatch.setattr(shared_l2, "LOOKUP_S", LOOKUP_S)
    monkeypatch.setattr(tiers.LOGGERS["shared"], "propagate", True)
    monkeypatch.setattr(tiers, "_quiet_until", {})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("objects", [1, 4, 16])
def test_a_look_up_has_one_budget_and_then_the_server_is_left_alone(objects, caplog):
    with slow_server(0.15) as server, engine_of(server) as engine:
        begin = time.monotonic()
        assert engine.look_up(range(objects)) == []
        assert time.monotonic() - begin < 1  # not 0.15 s for each command
        asked = server.connections  # the first was ended
        for number in range(20):
            assert engine.look_up([number]) == engine.load([number]) == []
        assert not engine.store([1, 2]).is_successful()
        assert server.connections == asked
    assert "left alone for 10 s: it answers too slowly" in caplog.text


def test_a_server_within_the_budget_is_asked_again():
    with slow_server(0.001) as server, engine_of(server) as engine:
        assert [engine.look_up([1, 2]) for _ in range(3)] == [[]] * 3
        assert server.commands == 6


def test_a_load_has_one_budget(monkeypatch):
    monkeypatch.setattr(shared_l2, "LOAD_S", 0.1)
    before = errors("load", "server")
    with slow_server(30) as server, engine_of(server) as engine:
        begin = time.monotonic()
        assert engine.load(range(16)) == []
        assert [engine.load([number]) for number in range(4)] == [[]] * 4
        assert time.monotonic() - begin < 1
        assert server.commands <= shared_l2.READS
    assert errors("load", "server") == before + 1


def test_an_answer_in_small_pieces_has_one_budget_and_frees_its_thread(monkeypatch):
    monkeypatch.setattr(shared_l2, "LOAD_S", 0.2)
    with slow_server(0) as server, engine_of(server) as engine:
        server.answers["GET"] = [b"$100000\r\n", *([b"x"] * 100000)]
        server.between_s = 0.01
        begin = time.monotonic()
        assert engine.load(range(8)) == []
        engine.tier.close()
        assert time.monotonic() - begin < 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("slow", ["TOUCH", "SET"])
def test_a_store_has_a_budget(monkeypatch, slow):
    monkeypatch.setattr(shared_values, "ANSWER_S", 0.1)
    with slow_server(0, **{slow: 30}) as server, engine_of(server) as engine:
        begin = time.monotonic()
        assert not engine.store(range(16)).is_successful()
        assert not engine.store(range(16)).is_successful()
        assert time.monotonic() - begin < 2
        assert server.commands <= 16 + 1  # all questions at once, or one object


# Values of others


SIZED = list(SHAPE)
HALF = [2, 2, 8, 128]
LAYOUTS = {
    "deep JSON": "[" * 3500,
    "deep objects": '{"a":' * 700,
    "empty": "",
    "null": "null",
    "number": "3",
    "four parts": json.dumps([1, 2, 3, 4]),
    "a huge number": '["KV_2LTD", [[' + "9" * 3000 + ']], ["bfloat16"]]',
    "a huge dimension": json.dumps(["KV_2LTD", [[2**70]], ["bfloat16"]]),
    "a product that overflows": json.dumps(["KV_2LTD", [[2**62, 4]], ["bfloat16"]]),
    "negative dimensions": json.dumps(["KV_2LTD", [[-2, -2, *SIZED[2:]]], ["bfloat16"]]),
    "another shape": json.dumps(["KV_2LTD", [[2, 2, 128, 16]], ["bfloat16"]]),
    "fewer dimensions": json.dumps(["KV_2LTD", [[4, 16, 128]], ["bfloat16"]]),
    "another dtype": json.dumps(["KV_2LTD", [SIZED], ["float16"]]),
    "a module for a dtype": json.dumps(["KV_2LTD", [SIZED], ["nn"]]),
    "a function for a dtype": json.dumps(["KV_2LTD", [SIZED], ["load"]]),
    "two objects": json.dumps(["KV_2LTD", [HALF, HALF], ["bfloat16", "bfloat16"]]),
    "more shapes than dtypes": json.dumps(["KV_2LTD", [HALF, HALF], ["bfloat16"]]),
    "no object": json.dumps(["KV_2LTD", [], []]),
    "another format": json.dumps(["KV_MLA_FMT", [SIZED], ["bfloat16"]]),
    "an unknown format": json.dumps(["NEW", [SIZED], ["bfloat16"]]),
    "a dimension that is no integer": json.dumps(["KV_2LTD", [[2.0, *SIZED[1:]]], ["bfloat16"]]),
}


def bad_utf8(name):
    """A header whose checksum is right, and whose key is no text."""
    header = bytearray(pack_chunk(name, "[]", memoryview(b""))[:HEADER_BYTES])
    header[header.index(name.encode())] = 0xFF
    struct.pack_into("<I", header, 12, 0)
    struct.pack_into("<I", header, 12, zlib.crc32(header))
    return bytes(header)


VALUES = {
    **{
        name: (lambda key, meta=meta: pack_chunk(key, meta, memoryview(bytes(OBJECT))))
        for name, meta in LAYOUTS.items()
    },
    "fewer tokens": lambda key: pack_chunk(
        key, json.dumps(["KV_2LTD", [HALF], ["bfloat16"]]), memoryview(bytes(OBJECT // 2))
    ),
    "no tokens": lambda key: pack_chunk(
        key, json.dumps(["KV_2LTD", [[2, 2, 0, 128]], ["bfloat16"]]), memoryview(b"")
    ),
    "bad UTF-8": bad_utf8,
}


@pytest.fixture(scope="module")
def stored():
    """A server with one chunk, an engine on it, and the chunk's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PASSWORD_VARIABLE, PASSWORD)
        server = Server()
        server.start()
        try:
            with closing(sharing.Engine(server.port)) as engine:
                engine.store([1])
                [name] = server.client.keys()
                yield server, engine, name.decode()
        finally:
            server.stop()
            server.client.close()


@needs_server
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_that_this_engine_would_not_store_is_a_miss_and_heals(stored, value):
    server, engine, name = stored
    server.client.set(name, value(name))
    before = errors("load", "corrupt")
    assert engine.load([1]) == []
    assert errors("load", "corrupt") == before + 1
    assert engine.look_up([1]) == []
    engine.store([1])
    assert engine.load([1]) == [1]
