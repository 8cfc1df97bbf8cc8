"""A worker's loads inside steps, with an imitated server and real shared memory."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import REGISTRY
from support.lending import Client, Connection, Key, chunks_of, copies, filled, succeeds

from lmcache_xpu.copies.transfers import Transfers

KEY = Key(tuple(range(24)), 0, 24)
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
OTHERS = [1, 2, 5, 6, 7, 16]
LAYERS = [f"layer {number}" for number in range(6)]
TIMEOUT_S = 0.3


class Engine:
    """A worker's transfers, and the engine that calls them."""

    def __init__(self, caches=None):
        self.client = Client()
        self.connection = Connection(self.client)
        self.healthy = self.connection.healthy
        self.caches = caches or {name: filled(number) for number, name in enumerate(LAYERS)}
        self.copies = copies(self.caches)
        self.transfers = Transfers(self.connection, [self.copies], TIMEOUT_S, self.caches)
        self.transfers.register()
        self.loads = self.transfers.in_steps
        self.before = [layer.clone() for layer in self.caches.values()]

    def store(self, blocks, sources=(), **chunks):
        event = self.transfers.event()
        return succeeds(self.transfers.store(chunks_of(blocks, **chunks), event, sources))

    def load(self, blocks=LOADED, *, layers=LAYERS, whole=False, looks=True, **chunks):
        """A step that loads; whether each layer was there when the engine came to it."""
        self.loads.begin_step(blocks)
        self.ask(blocks, **chunks)
        self.begin(whole=whole)
        there = [self.look(name, blocks) for name in layers if looks]
        self.loads.end()
        return there

    def ask(self, blocks=LOADED, **chunks):
        """Ask where the chunks are that a step loads into these blocks."""
        self.loads.ask(chunks_of(blocks, **chunks))

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
