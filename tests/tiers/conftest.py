"""Disk tier and shared tier in LMCache's engine, and a chunk store alone."""

from __future__ import annotations

import logging

import pytest
from support.chunk_files import NO_LIMIT
from support.servers import PASSWORD, Server
from support.storage import Engine

from lmcache_xpu import tiers
from lmcache_xpu.tiers import PASSWORD_VARIABLE
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore


@pytest.fixture
def engines(tmp_path):
    opened = []

    def start(**settings):
        engine = Engine(settings.pop("path", tmp_path / "kv"), **settings)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()
        assert engine.pool_in_use == 0  # every reference and pin came back
        assert {(obj.get_ref_count(), obj.is_pinned) for obj in engine.lent} <= {(0, False)}


@pytest.fixture(autouse=True)
def no_complaints_before(monkeypatch):
    monkeypatch.setattr(tiers, "_quiet_until", {})


@pytest.fixture
def log():
    """The tier's log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.lmcache_xpu.disk")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def store(directory):
    store = ChunkStore(directory, NO_LIMIT)
    yield store
    store.close()


@pytest.fixture
def server(monkeypatch):
    """A server of the shared tier, whose password engines know."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    server = Server()
    server.start()
    yield server
    server.stop()
    server.client.close()


@pytest.fixture
def engine(server):
    """Makes engines that share the server."""
    from support import sharing  # takes seconds, which other tests need not wait

    engines = []

    def make(**options):
        engines.append(sharing.Engine(server.port, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.fixture
def storages(server):
    """Makes servers of LMCache that share the server."""
    from support import sharing

    opened = []

    def start(**options):
        opened.append(sharing.Storage(server, **options))
        return opened[-1]

    yield start
    for storage in opened:
        storage.close()
