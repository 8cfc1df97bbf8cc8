"""Layerwise and asynchronous loads of the disk tier, as LMCache's engine drives them."""

from __future__ import annotations

import os

import torch
from lmcache.v1.memory_management import MemoryFormat
from support.chunk_files import file_of
from support.storage import (
    LAYER_SHAPE,
    LAYERS,
    content,
    make_key,
)


def store_layers(engine, numbers):
    for layer in range(LAYERS):
        keys = [make_key(n).split_layers(LAYERS)[layer] for n in numbers]
        objs = engine.manager.batched_allocate(
            LAYER_SHAPE, torch.bfloat16, len(numbers), fmt=MemoryFormat.KV_T2D, busy_loop=False
        )
        for number, obj in zip(numbers, objs, strict=True):
            obj.tensor.copy_(content(100 * layer + number, LAYER_SHAPE))
        engine.manager.batched_put(keys, objs)
    engine.settle()


def layer_major(numbers):
    return [[make_key(n).split_layers(LAYERS)[layer] for n in numbers] for layer in range(LAYERS)]


def load_layers(engine, numbers, location="disk"):
    """As `LMCacheEngine.retrieve_layer`: what came of each layer, references and pins dropped.

    What it hands over gets a pin of the GPU connector's.
    """
    handed_over, counts = [], []
    for task in engine.manager.layerwise_batched_get(layer_major(numbers), location=location):
        objs = task.result(10)
        layer = len(counts)
        for number, obj in zip(numbers, objs, strict=False):
            assert torch.equal(obj.tensor, content(100 * layer + number, LAYER_SHAPE))
            obj.pin()
        counts.append(len(objs))
        handed_over += objs
    for obj in handed_over:
        obj.ref_count_down()
    for obj in handed_over:  # after the copies are done: the memory must have lasted until here
        assert obj.is_valid()
        assert obj.is_pinned
        obj.unpin()
    return counts


def test_layerwise_load(engines):
    engine = engines()
    store_layers(engine, range(3))
    first_layers = [make_key(n).get_first_layer() for n in range(3)]
    assert all(engine.manager.contains(key) == "disk" for key in first_layers)
    assert load_layers(engine, range(3)) == [3, 3]
    assert engine.pool_in_use == 0


def test_a_layerwise_load_from_the_cpu_tier_leaves_the_pins_of_look_ups(engines):
    engine = engines(hot=True)
    store_layers(engine, range(3))
    keys = [key for layer in layer_major(range(3)) for key in layer]
    for _ in range(2):  # two requests look the same chunks up
        for key in keys:
            assert engine.manager.contains(key, pin=True) == "LocalCPUBackend"
    pins = [engine.pool.hot_cache[key].meta.pin_count for key in keys]
    assert pins == [2] * len(keys)
    for _ in range(2):
        assert load_layers(engine, range(3), "LocalCPUBackend") == [3, 3]
        assert [engine.pool.hot_cache[key].meta.pin_count for key in keys] == pins
    for _ in range(2):
        engine.manager.batched_unpin(keys)
    assert not any(engine.pool.hot_cache[key].is_pinned for key in keys)
    assert {engine.pool.hot_cache[key].get_ref_count() for key in keys} == {1}


def test_a_layer_that_cannot_be_loaded_shortens_its_list(engines):
    engine = engines()
    store_layers(engine, range(3))
    lost = make_key(1).split_layers(LAYERS)[1]
    os.truncate(file_of(engine.tier._store, engine.tier.name(lost)), 5000)
    assert load_layers(engine, range(3)) == [3, 1]
    assert engine.pool_in_use == 0


def test_a_chunk_without_one_of_its_layers_is_stored_anew(engines):
    engine = engines()
    store_layers(engine, [0])
    first, second = make_key(0).split_layers(LAYERS)
    assert engine.tier.contains(first)
    engine.tier.remove(second)
    assert not engine.tier.contains(first)  # what store_layer asks
    store_layers(engine, [0])
    assert load_layers(engine, [0]) == [1, 1]
