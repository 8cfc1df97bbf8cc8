"""The layout of a chunk: what a header holds of it, and what is read from that."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_xpu.tiers.chunk_layout import ChunkLayout


def test_tokens_are_those_of_each_format():
    layer = ChunkLayout((torch.Size([256, 2, 16]),), (torch.bfloat16,), MemoryFormat.KV_T2D)
    all_layers = ChunkLayout((torch.Size([2, 8, 256, 16]),), (torch.int8,), MemoryFormat.KV_2LTD)
    latent = ChunkLayout((torch.Size([256, 16]),), (torch.bfloat16,), MemoryFormat.KV_MLA_FMT)
    assert layer.tokens == all_layers.tokens == latent.tokens == 256


def test_a_chunk_of_bytes_has_the_tokens_that_its_server_cuts(monkeypatch):
    monkeypatch.setattr(ChunkLayout, "_bytes_tokens", 0)
    ChunkLayout.bytes_have_tokens(256)
    layout = ChunkLayout((torch.Size([1, 1, 5000]),), (torch.uint8,), MemoryFormat.KV_2LTD)
    assert layout.tokens == 256


def of(**metadata) -> ChunkLayout | None:
    fields = {
        "shape": torch.Size([2, 3, 16, 8]),
        "dtype": torch.float16,
        "shapes": None,
        "dtypes": None,
        "fmt": MemoryFormat.KV_2LTD,
        "cached_positions": None,
    }
    return ChunkLayout.of(SimpleNamespace(metadata=SimpleNamespace(**fields | metadata)))


def test_a_layout_is_read_as_it_was_written():
    layout = of()
    assert layout.text == '["KV_2LTD", [[2, 3, 16, 8]], ["float16"]]'
    assert ChunkLayout.parse(layout.text) == layout
    assert layout.size == 2 * 3 * 16 * 8 * 2


def test_an_object_of_several_shapes_has_them_all():
    shapes, dtypes = [torch.Size([4, 8]), torch.Size([4, 2])], [torch.uint8, torch.float32]
    layout = of(shapes=shapes, dtypes=dtypes)
    assert ChunkLayout.parse(layout.text) == layout
    assert layout.size == 4 * 8 + 4 * 2 * 4


def test_what_layout_and_bytes_can_not_bring_back_has_none():
    assert of(dtype=None) is None  # serialised
    assert of(cached_positions=torch.arange(16)) is None  # blended
