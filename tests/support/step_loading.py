"""A worker's loads inside steps, with an imitated server and real shared memory."""

from __future__ import annotations

import threading

import pytest
import torch
from prometheus_client import REGISTRY
from support.lending import Client, Key, copies, filled

from lmcache_xpu.mp_connector.transfer_context import ServerTransfers

KEY = Key(tuple(range(24)), 0, 24)
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
OTHERS = [1, 2, 5, 6, 7, 16]
LAYERS = [f"layer {number}" for number in range(6)]
TIMEOUT_S = 0.3


def named() -> Key:
    return KEY


def fail_to_name() -> Key:
    raise ZeroDivisionError("planted")


class Engine:
    """A worker's transfers, and the engine that calls them."""

    def __init__(self, caches=None):
        self.client, self.healthy = Client(), threading.Event()
        self.healthy.set()
        self.caches = caches or {name: filled(number) for number, name in enumerate(LAYERS)}
        self.copies = copies(self.caches)
        self.transfers = ServerTransfers(1, self.client, self.healthy, [self.copies], 8, TIMEOUT_S)
        self.transfers.register(None, "model", 1)
        self.loads = self.transfers.in_steps
        self.before = [layer.clone() for layer in self.caches.values()]

    def store(self, blocks, key=KEY, sources=()):
        self.transfers.compute_from({"request": sources} if sources else {})
        event = self.transfers.create_recorded_event()
        submitted = self.transfers.submit_store("request", key, None, [blocks], event, 2)
        return submitted.result(10)

    def load(self, blocks=LOADED, *, key=KEY, layers=LAYERS, whole=False, looks=True):
        """A step that loads; whether each layer was there when the engine came to it."""
        self.loads.begin_step(blocks)
        self.loads.ask("request", lambda: key, blocks)
        self.begin(whole=whole)
        there = [self.look(name, blocks) for name in layers if looks]
        self.loads.end()
        return there

    def begin(self, *, tokens=4, whole=False):
        """Begin what was asked for, as vLLM lets a worker do in two calls."""
        self.loads.begin_answered(tokens)
        self.loads.begin(whole=whole)

    def look(self, name, blocks):
        self.loads.before_layer(name)
        number = LAYERS.index(name)
        there = torch.equal(self.caches[name][blocks], self.before[number][STORED])
        self.loads.after_layer(name)
        return there


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.transfers.close()
    engine.client.close()


@pytest.fixture
def stored(engine):
    assert engine.store(STORED)
    return engine


def failures(direction, reason):
    labels = {"direction": direction, "tier": "server", "reason": reason}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels) or 0.0


def unchanged(engine, blocks):
    """Whether all layers have in these blocks what they had."""
    layers = zip(engine.caches.values(), engine.before, strict=True)
    return all(torch.equal(layer[blocks], was[blocks]) for layer, was in layers)
