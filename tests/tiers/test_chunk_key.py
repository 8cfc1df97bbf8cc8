"""Texts of keys: what tells chunks apart on a disk and in a server."""

from __future__ import annotations

import pytest
import torch
from support.storage import make_key, make_metadata

from lmcache_xpu.tiers.chunk_key import chunk_and_layer, engine_origin, is_of_model, key_text

ORIGIN = "xpu@(2, 2, 16, 2, 64)"


def test_the_text_of_a_chunk_and_of_one_layer():
    """Files and values of earlier versions are found by these."""
    key = make_key(0xABC)
    text = key_text(ORIGIN, key)
    assert text == f"{ORIGIN}@1@0@{key.chunk_hash_hex}@torch.bfloat16@-@a/model"
    assert chunk_and_layer(text) == (key.chunk_hash_hex, 0)
    layers = [key_text(ORIGIN, layer) for layer in key.split_layers(2)]
    assert [chunk_and_layer(layer) for layer in layers] == [(key.chunk_hash_hex, n) for n in (0, 1)]


@pytest.mark.parametrize(
    "other",
    [
        {"chunk_hash": 2},
        {"worker_id": 1},
        {"world_size": 2},
        {"dtype": torch.float16},
        {"model_name": "b/model"},
    ],
)
def test_another_key_has_another_text(other):
    assert key_text(ORIGIN, make_key(1)) != key_text(ORIGIN, make_key(1, **other))


def test_an_origin_says_the_device_and_the_shape():
    assert engine_origin(make_metadata()).endswith("@(2, 2, 16, 2, 64)")


def test_chunks_of_a_model_are_those_of_its_engines_alone():
    text = key_text(ORIGIN, make_key(1))
    assert is_of_model(text, ORIGIN, "a/model")
    assert not is_of_model(text, ORIGIN, "model")
    assert not is_of_model(text, "cpu@(2, 2, 16, 2, 64)", "a/model")
