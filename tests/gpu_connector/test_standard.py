"""The standard connector through LMCache's interface, with LMCache's own memory objects."""

from __future__ import annotations

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from support import caches
from support.caches import LATENT, Spec, bits, build
from support.connectors import make, memory, slots_of
from support.intel import KINDS_ON_MACHINES, MACHINES, on_machines
from support.intel import machine as machine  # a fixture

from lmcache_xpu.errors import (
    HostMemoryError,
    LayoutError,
    LMCacheXPUError,
    SettingsError,
    SlotError,
    TransferError,
)
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2


@pytest.mark.parametrize("layer_major", [False, True])
@KINDS_ON_MACHINES
def test_a_stored_request_loads_back_into_other_slots(kind: str, layer_major: bool):
    spec = Spec(kind, torch.uint8 if "scales" in kind else torch.bfloat16)
    source, target = build(spec), build(spec)
    connector = make(source, layer_major=layer_major)
    here, there = slots_of(4, 1, 3)[:11], slots_of(0, 5, 2)[:11]
    spans = ([0, 4, 8], [4, 8, 11])  # the last chunk ends inside a block
    objs = [memory(connector, end - start, spec.dtype) for start, end in zip(*spans, strict=True)]
    connector.batched_from_gpu(objs, *spans, kvcaches=source.engine, slot_mapping=here, offset=0)
    wanted = target.twin()
    for plane in range(source.planes):
        for layer in range(spec.layers):
            for here_slot, there_slot in zip(here.tolist(), there.tolist(), strict=True):
                wanted.put(plane, layer, there_slot, source.token(plane, layer, here_slot))
    connector.batched_to_gpu(objs, *spans, kvcaches=target.engine, slot_mapping=there, req_id="r")
    assert torch.equal(bits(target.raw), bits(wanted.raw))


def test_layer_major_memory_has_keys_and_values_of_a_layer_side_by_side():
    cache = build(Spec("BLHNC"))
    connector = make(cache, layer_major=True)
    obj = memory(connector, 4)
    connector.from_gpu(obj, 4, 8, kvcaches=cache.engine, slot_mapping=slots_of(0, 3))
    stored = obj.tensor.view(3, 2, 4, -1)  # three layers
    for layer in range(3):
        for plane in range(2):
            wanted = cache.token(plane, layer, 3 * 4 + 1)  # block 3, its second token
            assert torch.equal(bits(stored[layer, plane, 1]), bits(wanted))


def test_host_memory_is_lmcache_s_format():
    """KV_2LTD: [keys and values, layer, token, head x dim], whatever the engine's layout."""
    cache = build(Spec("BLHNC"))
    connector = make(cache)
    obj = memory(connector, 4)
    connector.from_gpu(obj, 4, 8, kvcaches=cache.engine, slot_mapping=slots_of(0, 3))
    assert obj.tensor.shape == (2, 3, 4, 16)
    for layer in range(3):
        key = cache.engine[layer][3, :, 2, :8]  # block 3, token 2: [heads, dim]
        value = cache.engine[layer][3, :, 2, 8:]
        assert torch.equal(bits(obj.tensor[0, layer, 2]), bits(key.flatten()))
        assert torch.equal(bits(obj.tensor[1, layer, 2]), bits(value.flatten()))


@on_machines("cached", here=[0, 1, 4, 5, 7, 8, 100], there=[5])
def test_tokens_the_engine_has_are_not_overwritten(cached: int):
    cache = build(Spec("LBNHC"))
    connector = make(cache)
    slots = slots_of(2, 5)
    objs = [memory(connector, 4), memory(connector, 4)]
    wanted = cache.twin()
    for plane in range(2):
        for layer in range(3):
            for token in range(cached, 8) if cached < 8 else ():
                value = objs[token // 4].tensor[plane, layer, token % 4]
                wanted.put(plane, layer, int(slots[token]), value)
    connector.batched_to_gpu(
        objs,
        [0, 4],
        [4, 8],
        kvcaches=cache.engine,
        slot_mapping=slots,
        vllm_cached_tokens=cached,
    )
    assert torch.equal(bits(cache.raw), bits(wanted.raw))


def test_opaque_blocks_travel_whole():
    source, target = build(Spec("LBHNC")), build(Spec("LBHNC"))
    connector = make(source, opaque_blocks=True, chunk_size=8)
    objs = [memory(connector, 8), memory(connector, 8)]
    spans = ([0, 8], [8, 16])
    connector.batched_from_gpu(
        objs, *spans, kvcaches=source.engine, slot_mapping=slots_of(5, 0, 2, 3)
    )
    before = target.raw.clone()
    connector.batched_to_gpu(
        objs,
        *spans,
        kvcaches=target.engine,
        slot_mapping=slots_of(1, 4, 0, 2),
        vllm_cached_tokens=4,
    )
    for layer in range(3):
        for there, here in ((4, 0), (0, 2), (2, 3)):
            assert torch.equal(bits(target.engine[layer][there]), bits(source.engine[layer][here]))
        for other in (1, 3, 5):  # block 1 is the engine's own
            old = before.as_strided((6, 128), (128, 1), 64 + layer * 768)[other]
            assert torch.equal(bits(target.engine[layer][other].flatten()), bits(old))


@pytest.mark.parametrize(
    ("ends", "cached", "says"), [([4, 7], 0, "tokens 4:7"), ([4, 8], 2, "2 are skipped")]
)
def test_opaque_blocks_are_never_cut(ends: list[int], cached: int, says: str):
    cache = build(Spec("LBHNC"))
    connector = make(cache, opaque_blocks=True)
    objs = [memory(connector, end - start) for start, end in zip([0, 4], ends, strict=True)]
    before = cache.raw.clone()
    with pytest.raises(SlotError, match=says):
        connector.batched_to_gpu(
            objs,
            [0, 4],
            ends,
            kvcaches=cache.engine,
            slot_mapping=slots_of(2, 5),
            vllm_cached_tokens=cached,
        )
    assert torch.equal(bits(cache.raw), bits(before))


def wrong(change: str):
    """A valid call of `batched_to_gpu` with one thing wrong."""
    cache = build(Spec("LBNHC"))
    connector = make(cache)
    call = {
        "memory_objs": [memory(connector, 4), memory(connector, 4)],
        "starts": [0, 4],
        "ends": [4, 8],
        "kvcaches": cache.engine,
        "slot_mapping": slots_of(2, 5),
    }
    objs = call["memory_objs"]
    match change:
        case "one end too few":
            call["ends"] = [4]
        case "one object too many":
            objs.append(memory(connector, 4))
        case "ends before it starts":
            call["ends"] = [4, 3]
        case "starts below zero":
            call["starts"] = [-4, 4]
        case "beyond the slot mapping":
            call["slot_mapping"] = slots_of(2, 5)[:7]
        case "no slot mapping":
            del call["slot_mapping"]
        case "no kv cache":
            del call["kvcaches"]
        case "slot out of range":
            call["slot_mapping"] = slots_of(2, 6)
        case "no tensor":
            objs[1].invalidate()
        case "wrong format":
            objs[1] = memory(connector, 4, fmt=MemoryFormat.KV_T2D)
        case "wrong dtype":
            objs[1] = memory(connector, 4, torch.float32)
        case "wrong shape":
            objs[1] = memory(connector, 3)
    return cache, connector, call


WRONG = {
    "one end too few": (TransferError, "2 starts and 1 ends"),
    "one object too many": (TransferError, "3 memory objects"),
    "ends before it starts": (TransferError, "tokens 4:3"),
    "starts below zero": (TransferError, "tokens -4:4"),
    "beyond the slot mapping": (SlotError, "tokens 4:8 with 7 slots"),
    "no slot mapping": (TransferError, "no slot_mapping"),
    "no kv cache": (TransferError, "no kvcaches"),
    "slot out of range": (SlotError, "slot 27; expected slots below 24"),
    "no tensor": (HostMemoryError, "was given back"),
    "wrong format": (HostMemoryError, "KV_T2D"),
    "wrong dtype": (HostMemoryError, "torch.float32; expected torch.bfloat16"),
    "wrong shape": (HostMemoryError, r"\[2, 3, 3, 16\]; expected \[2, 3, 4, 16\]"),
}


@pytest.mark.parametrize("direction", ["batched_to_gpu", "batched_from_gpu"])
@pytest.mark.parametrize("change", WRONG)
def test_bad_input_is_a_clear_error_and_changes_neither_side(change: str, direction: str):
    kind, says = WRONG[change]
    cache, connector, call = wrong(change)
    valid = [obj for obj in call["memory_objs"] if obj.tensor is not None]
    before, host = cache.raw.clone(), [obj.tensor.clone() for obj in valid]
    with pytest.raises(kind, match=says) as error:
        getattr(connector, direction)(**call)
    assert isinstance(error.value, (LMCacheXPUError, ValueError))
    assert torch.equal(bits(cache.raw), bits(before))
    for obj, old in zip(valid, host, strict=True):
        assert torch.equal(bits(obj.tensor), bits(old))


@MACHINES
def test_the_valid_call_is_valid():
    """Else every case above could fail for a reason of its own."""
    _, connector, call = wrong("nothing")
    connector.batched_to_gpu(**call)
    connector.batched_from_gpu(**call)


def test_options_and_engine_are_checked():
    with pytest.raises(SettingsError, match="'chunks'; expected one of"):
        VLLMPagedMemXPUConnectorV2(16, 3, chunks=4)
    cache = build(Spec("LBHNC"))
    spans = {"starts": [], "ends": [], "memory_objs": []}
    call = {**spans, "kvcaches": cache.engine, "slot_mapping": slots_of(1)}
    with pytest.raises(LayoutError, match=r"expected one on hpu"):
        VLLMPagedMemXPUConnectorV2(16, 3, device="hpu").batched_to_gpu(**call)
    with pytest.raises(LayoutError, match=r"bfloat16; expected torch\.float16"):
        VLLMPagedMemXPUConnectorV2(16, 3, dtype=torch.float16).batched_to_gpu(**call)
    with pytest.raises(LayoutError, match="chunks of 6 tokens on blocks of 4"):
        make(cache, opaque_blocks=True, chunk_size=6).batched_to_gpu(**call)


@MACHINES
def test_from_metadata_and_shapes():
    def metadata(mla: bool):
        shape = (3, 1 if mla else 2, 256, 1 if mla else 2, 20 if mla else 8)
        return LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, shape, use_mla=mla)

    for kind in ("LBHNC", LATENT[1]):
        cache = build(Spec(kind))
        connector = VLLMPagedMemXPUConnectorV2.from_metadata(
            metadata(cache.geometry.mla), use_gpu=True, device=torch.device(caches.DEVICE)
        )
        planes = 1 if cache.geometry.mla else 2
        assert connector.get_shape(7) == torch.Size([planes, 3, 7, cache.geometry.hidden])
        # As LMCache's own metadata sizes the memory that it hands us.
        assert [connector.get_shape(7)] == metadata(cache.geometry.mla).get_shapes(7)
        obj = memory(connector, 4)
        connector.to_gpu(obj, 0, 4, kvcaches=cache.engine, slot_mapping=slots_of(1))
        back = memory(connector, 4)
        connector.from_gpu(back, 0, 4, slot_mapping=slots_of(1))  # the cache is known by now
        assert torch.equal(bits(back.tensor), bits(obj.tensor))
        assert back.metadata.fmt == obj.metadata.fmt


@MACHINES
def test_an_engine_that_moves_its_cache_is_followed():
    first, second = build(Spec("LBNHC")), build(Spec("LBNHC"))
    connector = make(first)
    obj = memory(connector, 4)
    connector.to_gpu(obj, 0, 4, kvcaches=first.engine, slot_mapping=slots_of(1))
    before = first.raw.clone()
    obj.tensor.view(torch.uint8).random_(0, 256)
    connector.to_gpu(obj, 0, 4, kvcaches=second.engine, slot_mapping=slots_of(1))
    assert torch.equal(bits(first.raw), bits(before))
    assert torch.equal(bits(second.token(0, 0, 5)), bits(obj.tensor[0, 0, 1]))


@MACHINES
def test_inference_mode_makes_no_difference():
    """LMCache stores and loads inside of it, vLLM registers its cache outside of it."""
    cache = build(Spec("LBNHC"))
    connector = make(cache)
    connector.initialize_kvcaches_ptr(kvcaches=cache.engine)
    obj = memory(connector, 4)
    with torch.inference_mode():
        connector.to_gpu(obj, 0, 4, kvcaches=cache.engine, slot_mapping=slots_of(1))
    with torch.inference_mode():
        inside = build(Spec("LBNHC"))
        connector.to_gpu(obj, 0, 4, kvcaches=inside.engine, slot_mapping=slots_of(1))
    connector.to_gpu(obj, 0, 4, kvcaches=inside.engine, slot_mapping=slots_of(2))
    assert torch.equal(bits(inside.token(1, 2, 9)), bits(obj.tensor[1, 2, 1]))
