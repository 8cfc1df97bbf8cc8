from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.model.kv_cache_groups import CacheGroup, cache_groups

pytest.importorskip("vllm")
ATTENTION = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def config(*specs):
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer {n}"], enable_kv_transfer=True)
        for n, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def specs():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    return (
        FullAttentionSpec(**ATTENTION),
        SlidingWindowSpec(**ATTENTION, sliding_window=512),
        MambaSpec(
            block_size=128, shapes=((3, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
        ),
    )


def test_groups_are_numbered_as_vllm_does_and_know_what_a_hit_needs():
    whole, window, state = cache_groups(config(*specs()))
    assert (whole.number, whole.layers, whole.window) == (0, ("layer 0",), None)
    assert (window.number, window.window, window.recurrent) == (1, 512, False)
    assert (state.number, state.window, state.recurrent) == (2, 128, True)
    assert [group.window_chunks(256) for group in (whole, window, state)] == [0, 2, 1]


def test_a_hit_needs_the_stretch_in_which_it_ends():
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    stretch = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=512)
    _, group = cache_groups(config(specs()[0], stretch))
    assert (group.window, group.recurrent, group.window_chunks(256)) == (512, False, 2)


@pytest.mark.parametrize(("retained", "window"), [(0, 512), (1, 512), (130, 641)])
def test_a_window_has_what_a_drafter_computes_again(retained, window):
    whole, spec, _ = specs()
    if not hasattr(spec, "extra_retained_tokens"):
        pytest.skip("this vLLM keeps nothing before a window")
    spec = dataclasses.replace(spec, extra_retained_tokens=retained)
    assert cache_groups(config(whole, spec))[1].window == window


def test_windows_in_every_layer_are_kept_whole():
    """The server is told of windows by group, and expects no group where there is one."""
    [group] = cache_groups(config(specs()[1]))
    assert (group.window, group.window_chunks(256)) == (None, 0)


def test_states_in_every_layer_are_refused():
    with pytest.raises(LayoutError, match="--no-offload"):
        cache_groups(config(specs()[2]))


def test_layers_that_can_not_be_restored_are_refused():
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    with pytest.raises(LayoutError, match="CrossAttentionSpec"):
        cache_groups(config(CrossAttentionSpec(**ATTENTION)))


@pytest.mark.parametrize(
    ("window", "blocks", "storable"),
    [
        (None, [5, 6, 7, 8], True),
        (None, [0, 6, 7, 8], False),
        (128, [0, 0, 0, 8], True),  # a state: the last block is all of it
        (128, [5, 6, 7, 0], False),
        (200, [0, 0, 7, 8], True),  # a window in a chunk: its last two blocks
        (200, [5, 6, 0, 8], False),
        (4096, [0, 6, 7, 8], False),  # a window over chunks: all of this one
    ],
)
def test_a_chunk_is_stored_if_it_has_every_block_that_a_hit_may_need(window, blocks, storable):
    group = CacheGroup(number=0, layers=("layer",), block_tokens=128, window=window)
    assert group.is_storable(blocks, 512) is storable
