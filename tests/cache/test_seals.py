from __future__ import annotations

import dataclasses

import pytest
import torch
from support.lending import CHUNK, Key

from lmcache_xpu.cache.seals import SEAL_BYTES, break_seal, seal, seals_at, seals_of

TOKENS = tuple(range(100, 132))
KEY = Key(TOKENS, 0, 32)


@pytest.fixture
def memory():
    return torch.zeros(300, dtype=torch.uint8)


def test_a_seal_is_in_the_last_bytes_and_is_broken_before_a_write(memory):
    [digest, other, *_] = seals_of(KEY, CHUNK, "layout")
    ends = [100, 300]
    seal(memory[:100], digest)
    seal(memory[100:], other)
    assert seals_at(memory, ends) == digest + other
    assert seals_at(memory, ends[::-1]) == other + digest
    assert not memory[: 100 - SEAL_BYTES].any()
    assert not memory[100:-SEAL_BYTES].any()
    break_seal(memory[100:])
    assert seals_at(memory, ends) == digest + bytes(len(other))


def test_every_chunk_has_its_own_seal_wherever_a_key_begins():
    seals = seals_of(KEY, CHUNK, "layout")
    assert len(set(seals)) == 4
    assert seals_of(dataclasses.replace(KEY, start=16), CHUNK, "layout") == seals[2:]
    assert seals_of(dataclasses.replace(KEY, end=16), CHUNK, "layout") == seals[:2]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "other"},
        {"model_name": "other"},
        {"world_size": 2},
        {"worker_id": 1},
        {"tokens": (99, *TOKENS[1:])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_sets_chunks_apart_is_in_every_seal(change):
    others = seals_of(dataclasses.replace(KEY, **change), CHUNK, "layout")
    assert not set(others) & set(seals_of(KEY, CHUNK, "layout"))
    assert not set(seals_of(KEY, CHUNK, "other")) & set(seals_of(KEY, CHUNK, "layout"))


def test_a_request_has_the_seals_of_another_with_the_same_tokens():
    other = dataclasses.replace(KEY, request_id="other")
    assert seals_of(other, CHUNK, "layout") == seals_of(KEY, CHUNK, "layout")


def test_an_images_place_is_a_number_of_64_bits():
    """The first number stands for one; without it the tokens after are packed another way."""
    image = dataclasses.replace(KEY, tokens=(2**64 - 1, *TOKENS[1:]))
    short = dataclasses.replace(KEY, tokens=(2**32 - 1, *TOKENS[1:]))
    assert seals_of(image, CHUNK, "layout") == seals_of(short, CHUNK, "layout")


def test_tokens_are_packed_as_newer_lmcache_packs_them():
    packed = b"".join(token.to_bytes(4, "big") for token in TOKENS)

    class Newer:
        token_bytes = packed
        model_name, world_size, worker_id, cache_salt = "model", 1, 0, ""
        start, end = 0, 32

    assert seals_of(Newer(), CHUNK, "layout") == seals_of(KEY, CHUNK, "layout")
