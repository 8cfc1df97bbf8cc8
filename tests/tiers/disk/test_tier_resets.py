"""What a reset removes from the disk tier: this engine's model, wherever it is by then."""

from __future__ import annotations

import threading
from pathlib import Path

from support.storage import content, make_key, make_metadata

from lmcache_xpu.tiers.disk import chunk_store


def other_model():
    metadata = make_metadata()
    metadata.model_name = "another/a/model"
    return metadata


def test_all_of_this_model_goes_and_another_one_stays(engines):
    other = engines(metadata=other_model())
    key = make_key(1, model_name="another/a/model")
    other.manager.batched_put([key], [other.allocate(content(1))])
    other.settle()
    other.close()
    engine = engines()
    engine.store(range(5))
    assert engine.tier.pin(make_key(3))
    assert engine.tier.forget_model()
    assert [engine.tier.contains(make_key(n)) for n in (0, 1, 2, 4)] == [False] * 4
    assert engine.load([3]) == []
    assert engine.tier.counters.bytes == engine.tier._store._index.used_bytes > 0
    engine.tier.unpin(make_key(3))
    engine.close()
    again = engines()
    assert again.load(range(5)) == []
    again.store([3])
    assert again.load([3]) == [3]
    assert again.tier.contains(key)


def test_what_is_being_written_goes_too(engines, monkeypatch):
    engine = engines(**{"disk.threads": 2})
    go, begun = threading.Event(), threading.Event()
    write = chunk_store.write_chunk

    def slow(*args):
        begun.set()
        assert go.wait(10)
        write(*args)

    monkeypatch.setattr(chunk_store, "write_chunk", slow)
    engine.store(range(4), wait=False)  # one is written, three are queued
    assert begun.wait(10)
    threading.Timer(0.2, go.set).start()
    assert engine.tier.forget_model()
    assert engine.tier.pending == 0
    assert engine.tier.counters.bytes == 0
    assert engine.pool_in_use == 0
    engine.store([0])
    assert engine.load([0]) == [0]


def test_what_cannot_be_removed_is_said(engines, monkeypatch):
    engine = engines()
    engine.store([0, 1])
    unlink = Path.unlink

    def refuse(path, *args, **kwargs):
        if path.name == engine.file(1).name:
            raise PermissionError("planted")
        unlink(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert not engine.tier.forget_model()
    assert not engine.tier.contains(make_key(1))
    engine.file(1).unlink()


def test_a_directory_that_was_let_go_is_left_alone(engines):
    engine = engines()
    engine.store([0])
    engine.close()
    assert not engine.tier.forget_model()
    assert engines().load([0]) == [0]
