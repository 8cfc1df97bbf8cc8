"""Stores and loads of a worker, with an imitated server and real shared memory."""

from __future__ import annotations

import time

import pytest
import torch
from prometheus_client import REGISTRY
from support.lending import (
    BLOCK,
    BLOCKS,
    CHUNK,
    Client,
    Connection,
    Key,
    chunks_of,
    copies,
    filled,
    succeeds,
)

pytest.importorskip("vllm")

from lmcache_xpu.cache.hit_places import COMMIT, REGISTER, RESERVE
from lmcache_xpu.copies import transfers
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.errors import LayoutError, SettingsError

KEY = Key(tuple(range(24)), 0, 24)
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
TIMEOUT_S = 0.3


class Worker:
    """A worker's transfers."""

    def __init__(self, client, *groups):
        connection = Connection(client)
        self.client, self.groups, self.healthy = client, list(groups), connection.healthy
        self.transfers = Transfers(connection, self.groups, TIMEOUT_S, ())
        self.transfers.register()

    def store(self, blocks):
        return succeeds(self.begin_store(blocks))

    def begin_store(self, blocks):
        return self.transfers.store(chunks_of(*blocks), self.transfers.event(), ())

    def load(self, blocks, **chunks):
        return succeeds(self.transfers.load(chunks_of(*blocks, **chunks), self.transfers.event()))


@pytest.fixture
def dense():
    """A worker of a dense model, and its layers."""
    client, caches = Client(), {f"layer {n}": filled(n) for n in range(3)}
    worker = Worker(client, copies(caches))
    yield worker, list(caches.values())
    worker.transfers.close()
    client.close()


def failures(direction, reason):
    labels = {"direction": direction, "tier": "server", "reason": reason}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels) or 0.0


def moved(direction):
    labels = {"direction": direction, "tier": "server"}
    return REGISTRY.get_sample_value("lmcache_xpu_tokens_total", labels) or 0.0


def test_what_was_stored_is_loaded_into_other_blocks_and_nothing_else_changes(dense):
    worker, layers = dense
    before, tokens = [layer.clone() for layer in layers], moved("load")
    assert worker.store([STORED])
    assert worker.load([LOADED])
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[LOADED], was[STORED])
        others = [block for block in range(BLOCKS) if block not in LOADED]
        assert torch.equal(layer[others], was[others])
    assert moved("load") - tokens == 24


def test_blocks_that_the_engine_has_are_left_alone(dense):
    worker, layers = dense
    before = layers[0].clone()
    assert worker.store([STORED])
    assert worker.load([LOADED], kept=2 * BLOCK)
    assert torch.equal(layers[0][LOADED[:2]], before[LOADED[:2]])
    assert torch.equal(layers[0][LOADED[2:]], before[STORED[2:]])


def test_what_the_server_has_is_not_stored_again(dense):
    worker, _ = dense
    assert worker.store([STORED])
    assert worker.store([STORED])
    assert worker.client.calls.count(COMMIT) == 1


def test_what_a_worker_left_half_written_is_not_loaded(dense, monkeypatch):
    worker, layers = dense
    before, count = layers[0].clone(), failures("load", "damaged")
    monkeypatch.setattr(worker.groups[0], "store", lambda *_: 1 / 0)
    assert not worker.store([STORED])
    assert failures("store", "ZeroDivisionError") >= 1
    worker.client.publish_unfinished()
    assert not worker.load([LOADED])
    assert failures("load", "damaged") == count + 1
    assert torch.equal(layers[0], before)
    assert worker.transfers.take_damaged() == {"request"}
    assert worker.transfers.take_damaged() == set()


def test_memory_that_is_lent_to_another_meanwhile_is_not_taken_for_the_chunk(dense, monkeypatch):
    worker, _ = dense
    assert worker.store([STORED])
    load = worker.groups[0].load

    def overwritten(chunks, objects):
        handles = load(chunks, objects)
        objects[1].fill_(9)
        return handles

    monkeypatch.setattr(worker.groups[0], "load", overwritten)
    count = failures("load", "damaged")
    assert not worker.load([LOADED])
    assert failures("load", "damaged") == count + 1


def test_blocks_that_left_a_window_cost_their_store_and_no_error(dense):
    worker, _ = dense
    count = failures("store", "overtaken")
    assert not worker.store([[0, 0, *STORED[2:]]])
    assert failures("store", "overtaken") == count + 1


@pytest.mark.parametrize("block", [2, 4])
def test_a_chunk_of_several_states_is_refused_with_the_fix(block):
    """vLLM keeps the last state of a step: of two in a chunk it may be the first."""
    page = filled(3).reshape(BLOCKS, -1)
    with pytest.raises(LayoutError, match=f"states of {block}.*Set chunk_tokens to {block}"):
        copies({"state": page}, window=block, recurrent=True, block_tokens=block)


def test_keys_with_another_salt_hit_nothing(dense):
    worker, _ = dense
    count = failures("load", "missing")
    assert worker.store([STORED])
    assert not worker.load([LOADED], salt="other")
    assert failures("load", "missing") == count + 1
    assert worker.transfers.take_damaged() == set()


def test_a_server_that_does_not_answer_costs_one_wait_and_is_lost(dense):
    worker, layers = dense
    before = layers[0].clone()
    worker.client.silent = True
    begin = time.monotonic()
    assert not worker.store([STORED])
    assert time.monotonic() - begin < 5 * TIMEOUT_S
    assert not worker.healthy.is_set()
    begin = time.monotonic()
    assert not worker.load([LOADED])
    assert not worker.store([STORED])
    assert time.monotonic() - begin < TIMEOUT_S
    assert torch.equal(layers[0], before)
    assert worker.client.calls == ["register", REGISTER, RESERVE]  # it is asked nothing more


def test_the_engine_is_not_held_and_takes_its_blocks_back(dense):
    worker, _ = dense
    worker.client.silent, count = True, failures("store", "overtaken")
    begin = time.monotonic()
    stored = worker.begin_store([STORED])
    assert worker.transfers.busy
    worker.transfers.let_write([30, 31])  # others
    assert time.monotonic() - begin < transfers.GRACE_S
    worker.transfers.let_write([STORED[-1]])
    assert time.monotonic() - begin < 10 * transfers.GRACE_S
    assert not succeeds(stored)
    assert failures("store", "overtaken") == count + 1
    assert worker.healthy.is_set()


def test_loads_that_ended_are_told_once_and_the_blocks_of_those_that_failed(dense):
    worker, _ = dense
    assert worker.store([STORED])
    assert worker.load([LOADED])
    assert worker.transfers.take_ended() == ({"request"}, set())
    assert worker.transfers.take_ended() == (set(), set())
    assert not worker.load([LOADED], salt="other", kept=BLOCK)
    worker.transfers.fail({"unserved": frozenset({30, 31})})
    assert worker.transfers.take_ended() == ({"request", "unserved"}, {"request", "unserved"})
    assert worker.transfers.take_unfilled() == {*LOADED[1:], 30, 31}
    assert worker.transfers.take_unfilled() == set()


def test_a_server_that_was_started_again_lends_other_memory(dense):
    worker, layers = dense
    before = layers[0].clone()
    assert worker.store([STORED])
    worker.client.path.unlink()
    worker.client.path.touch(mode=0o600)
    worker.client.path.write_bytes(bytes(2**20))
    worker.client.objects.clear()
    worker.transfers.register()
    assert not worker.load([LOADED])
    assert worker.store([STORED])
    assert worker.load([LOADED])
    assert torch.equal(layers[0][LOADED], before[STORED])


def test_a_server_without_shared_memory_is_refused(dense):
    worker, _ = dense
    worker.client.name = ""
    with pytest.raises(SettingsError, match="--shm-name"):
        worker.transfers.register()


@pytest.fixture
def hybrid():
    """A worker with layers of a whole prompt, of a window of 12 tokens, and with a state."""
    client = Client()
    whole = {f"whole {n}": filled(n) for n in range(2)}
    window = {"window": filled(2)}
    page = filled(3).reshape(BLOCKS, -1).contiguous()
    state = {
        "state": [page.as_strided((BLOCKS, 8), (48, 1)), page.as_strided((BLOCKS, 3), (48, 1), 9)]
    }
    groups = (
        copies(whole),
        copies(window, number=1, window=12),
        copies(state, number=2, window=CHUNK, recurrent=True, block_tokens=CHUNK),
    )
    worker = Worker(client, *groups)
    yield worker, (*whole.values(), *window.values(), page)
    worker.transfers.close()
    client.close()


def test_each_group_stores_what_a_hit_may_need_and_loads_what_it_needs(hybrid):
    worker, caches = hybrid
    before = [cache.clone() for cache in caches]
    stored = [STORED, [0, 0, 0, 8, 20, 21], [0, 8, 21]]
    loaded = [LOADED, [0, 0, 0, 16, 17, 18], [0, 0, 19]]
    assert worker.store(stored)
    assert worker.client.skipped == ((), (0, 1), (0,))
    assert worker.client.objects.keys() == {
        (group, name)
        for group, chunks in enumerate(([0, 1, 2], [2], [1, 2]))
        for name in [KEY.names()[chunk] for chunk in chunks]
    }
    assert not worker.load(loaded)  # of the window a chunk is missing
    stored[1] = [0, 0, 9, 8, 20, 21]
    assert worker.store(stored)
    assert worker.load(loaded)
    for number, (group, was) in enumerate(zip(caches, before, strict=True)):
        kind = max(0, number - 1)
        to = [block for block in loaded[kind] if block]
        pairs = zip(loaded[kind], stored[kind], strict=True)
        assert torch.equal(group[to], was[[source for target, source in pairs if target]])
        others = [block for block in range(BLOCKS) if block not in to]
        assert torch.equal(group[others], was[others])
