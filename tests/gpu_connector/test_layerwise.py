"""The layerwise connector, driven as LMCache's engine and vLLM adapter drive it."""

from __future__ import annotations

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from support.caches import Spec, bits, build
from support.connectors import ALLOCATOR, objects, slots_of
from support.intel import KINDS_ON_MACHINES, MACHINES, on_machines
from support.intel import machine as machine  # a fixture
from support.layerwise import LAYERS, SPANS, connect, load, moved, start, store

from lmcache_xpu.errors import HostMemoryError, SlotError, TransferError
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector


@KINDS_ON_MACHINES
def test_a_stored_request_loads_back_into_other_slots(kind: str):
    spec = Spec(kind, torch.uint8 if "scales" in kind else torch.bfloat16)
    source, target = build(spec), build(spec)
    connector = connect(source)
    here, there = slots_of(4, 1, 3)[:11], slots_of(0, 5, 2)[:11]
    objs = objects(connector, SPANS, spec.dtype)
    store(connector, objs, SPANS, here, source)
    wanted = moved(source, here, target, there)
    load(connector, objs, SPANS, there, target)
    assert torch.equal(bits(target.raw), bits(wanted))


def test_host_memory_is_lmcache_s_format():
    cache = build(Spec("BLHNC"))
    connector = connect(cache)
    assert connector.get_shape(5) == torch.Size([5, 2, 16])
    objs = objects(connector, SPANS)
    store(connector, objs, SPANS, slots_of(0, 3, 1)[:11], cache)
    for layer in range(LAYERS):
        key = cache.engine[layer][3, :, 2, :8]  # block 3, token 2: [heads, dim]
        assert torch.equal(bits(objs[layer][1].tensor[2, 0]), bits(key.flatten()))
    latent = connect(build(Spec("MLA LBHNC")))
    assert latent.get_shape(5) == torch.Size([5, 20])


@MACHINES
def test_one_token_and_gaps_between_chunks():
    """LMCache's store leaves out chunks that it has already."""
    spec = Spec("LBNHC")
    source, target = build(spec), build(spec)
    connector = connect(source)
    spans = ([0, 8, 11], [4, 9, 12])
    objs = objects(connector, spans)
    slots = slots_of(4, 1, 3)
    store(connector, objs, spans, slots, source)
    kept = torch.cat([slots[a:b] for a, b in zip(*spans, strict=True)])
    wanted = moved(source, kept, target, kept)
    load(connector, objs, spans, slots, target)
    assert torch.equal(bits(target.raw), bits(wanted))


@MACHINES
def test_tokens_the_engine_has_are_not_overwritten():
    spec = Spec("LBHNC")
    source, target = build(spec), build(spec)
    connector = connect(source)
    slots = slots_of(4, 1, 3)[:11]
    objs = objects(connector, SPANS)
    store(connector, objs, SPANS, slots, source)
    wanted = moved(source, slots[5:], target, slots[5:])
    load(connector, objs, SPANS, slots, target, vllm_cached_tokens=5)
    assert torch.equal(bits(target.raw), bits(wanted))


def test_opaque_blocks_travel_whole():
    spec = Spec("LBHNC")
    source, target = build(spec), build(spec)
    connector = connect(source, opaque_blocks=True, chunk_size=8)
    spans = ([0, 8], [8, 16])
    objs = objects(connector, spans)
    store(connector, objs, spans, slots_of(5, 0, 2, 3), source)
    load(connector, objs, spans, slots_of(1, 4, 0, 2), target)
    for layer in range(LAYERS):
        for there, here in ((1, 5), (4, 0), (0, 2), (2, 3)):
            assert torch.equal(bits(target.engine[layer][there]), bits(source.engine[layer][here]))
    with pytest.raises(SlotError, match="tokens 0:3"):
        store(connector, objects(connector, ([0], [3])), ([0], [3]), slots_of(5), source)


@MACHINES
def test_each_layer_is_complete_when_it_is_published():
    source = build(Spec("LBNHC"))
    connector = connect(source)
    objs = objects(connector, SPANS)
    slots = slots_of(4, 1, 3)[:11]
    steps = connector.batched_from_gpu(objs, *SPANS, kvcaches=source.engine, slot_mapping=slots)
    next(steps)
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:  # computed only now, as an engine would
            source.engine[layer + 1].view(torch.uint8).random_(0, 256)
        next(steps)
        for token in range(11):
            obj, at = objs[layer][token // 4], token % 4
            wanted = source.token(1, layer, int(slots[token]))
            assert torch.equal(bits(obj.tensor[at, 1]), bits(wanted))


@MACHINES
def test_requests_interleave_layer_by_layer():
    spec = Spec("LBHNC")
    source, target = build(spec), build(spec)
    connector = connect(source)
    requests = [(([0], [4]), slots_of(4)), (([0, 4], [4, 8]), slots_of(1, 3))]
    stored = [objects(connector, spans) for spans, _ in requests]
    stores = [
        connector.batched_from_gpu(objs, *spans, kvcaches=source.engine, slot_mapping=slots)
        for objs, (spans, slots) in zip(stored, requests, strict=True)
    ]
    for _ in range(LAYERS + 1):
        for steps in stores:
            next(steps)
    loads = [
        connector.batched_to_gpu(*spans, kvcaches=target.engine, slot_mapping=slots)
        for spans, slots in requests
    ]
    for steps in loads:
        next(steps)
    for layer in range(LAYERS):
        for steps, objs in zip(loads, stored, strict=True):
            steps.send(objs[layer])
    for steps in loads:
        next(steps)
    slots = slots_of(4, 1, 3)
    wanted = moved(source, slots, build(spec, target.raw.clone()), slots)
    assert torch.equal(bits(target.raw), bits(wanted))


@on_machines("sent", here=range(LAYERS + 1), there=[2])
def test_a_load_that_is_given_up_lets_go_of_its_memory(sent: int):
    cache = build(Spec("LBNHC"))
    connector = connect(cache)
    objs = objects(connector, SPANS)
    slots = slots_of(4, 1, 3)[:11]
    counts = [obj.metadata.ref_count for layer in objs for obj in layer]
    steps = connector.batched_to_gpu(*SPANS, kvcaches=cache.engine, slot_mapping=slots)
    next(steps)
    for layer in range(sent):
        steps.send(objs[layer])
        assert objs[layer][0].metadata.ref_count == counts[0] + 1  # held while it is copied
    steps.close()
    assert [obj.metadata.ref_count for layer in objs for obj in layer] == counts
    other = build(Spec("LBNHC"))  # and the next request is unharmed
    store(connector, objs, SPANS, slots, cache)
    wanted = moved(cache, slots, other, slots)
    load(connector, objs, SPANS, slots, other)
    assert torch.equal(bits(other.raw), bits(wanted))


def test_a_finished_load_lets_go_of_its_memory():
    cache = build(Spec("LBNHC"))
    connector = connect(cache)
    objs = objects(connector, SPANS)
    load(connector, objs, SPANS, slots_of(4, 1, 3)[:11], cache)
    assert {obj.metadata.ref_count for layer in objs for obj in layer} == {1}


def test_a_missing_layer_and_one_too_many_are_errors():
    cache = build(Spec("LBNHC"))
    connector = connect(cache)
    objs = objects(connector, SPANS)
    steps = start(connector, cache)
    steps.send(objs[0])
    with pytest.raises(TransferError, match="no memory objects for layer 1"):
        next(steps)
    steps = start(connector, cache)
    for layer in range(LAYERS):
        steps.send(objs[layer])
    with pytest.raises(TransferError, match="a layer 3; expected 3 layers"):
        steps.send(objs[0])
    assert {obj.metadata.ref_count for layer in objs for obj in layer} == {1}


def test_an_advance_beyond_the_end_is_an_error():
    cache = build(Spec("LBNHC"))
    connector = connect(cache)
    objs = objects(connector, SPANS)
    steps = start(connector, cache)
    for layer in range(LAYERS):
        steps.send(objs[layer])
    next(steps)
    with pytest.raises(TransferError, match="beyond its end; expected 5 steps"):
        next(steps)
    call = {"kvcaches": cache.engine, "slot_mapping": slots_of(4, 1, 3)[:11]}
    steps = connector.batched_from_gpu(objs, *SPANS, **call)
    for _ in range(LAYERS + 1):
        next(steps)
    with pytest.raises(TransferError, match="beyond its end; expected 4 steps"):
        next(steps)


def test_wrong_objects_leave_their_layer_alone():
    cache = build(Spec("LBNHC"))
    connector = connect(cache)
    objs = objects(connector, SPANS)
    standard = ALLOCATOR.allocate(connector.get_shape(3), torch.bfloat16, MemoryFormat.KV_2LTD)
    for bad, says in (
        ([*objs[1], objs[1][0]], "4 memory objects, 3 starts and 3 ends"),
        (objs[1][:2], "2 memory objects, 3 starts and 3 ends"),  # a tier lost the rest
        ([*objs[1][:2], standard], "KV_2LTD"),
        ([*objs[1][:2], objs[1][0]], r"shape \[4, 2, 16\]; expected \[3, 2, 16\]"),
    ):
        steps = start(connector, cache)
        steps.send(objs[0])
        before = cache.raw.clone()
        with pytest.raises((HostMemoryError, TransferError), match=says):
            steps.send(bad)
        assert torch.equal(bits(cache.raw), bits(before))
    assert {obj.metadata.ref_count for layer in objs for obj in layer} == {1}
    steps = connector.batched_from_gpu(
        objs[:2], *SPANS, kvcaches=cache.engine, slot_mapping=slots_of(4, 1, 3)[:11]
    )
    with pytest.raises(TransferError, match="objects of 2 layers; expected 3"):
        next(steps)


def test_the_standard_calls_name_the_right_ones():
    connector = connect(build(Spec("LBNHC")))
    with pytest.raises(NotImplementedError, match="batched_to_gpu"):
        connector.to_gpu(None, 0, 1)
    with pytest.raises(NotImplementedError, match="batched_from_gpu"):
        connector.from_gpu(None, 0, 1)


def test_both_names_of_the_staging_flag():
    assert VLLMPagedMemLayerwiseXPUConnector(16, 3, use_xpu=True).use_gpu
    assert VLLMPagedMemLayerwiseXPUConnector(16, 3, True).use_gpu
