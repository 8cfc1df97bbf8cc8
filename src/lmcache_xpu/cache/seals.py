"""Seals: whether an object in the server's memory is the chunk that it should be, and whole.

The server lends memory and does not look into it. It publishes an object that a worker left half
written when that worker ends, and it takes memory back whose lease is over, whoever still copies.
So each object ends in a seal, which names its chunk. A worker breaks it before it writes, and sets
it when all bytes are there. A reader compares it before and after it copies.

A seal is a digest of what sets the chunk apart: the model, the rank, the salt, the group's layout
in memory, and all tokens up to the chunk's last one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Seals = list[list[bytes]]  # by group, of each chunk
SEAL_BYTES = 64
_DIGEST_BYTES = 32


def seals_of(key: Any, chunk_tokens: int, layout: str) -> list[bytes]:
    """Return the seal of each chunk of LMCache's key; `layout` is the layers', in words."""
    names = (key.model_name, key.world_size, key.worker_id, key.cache_salt, layout)
    running = hashlib.blake2b(repr(names).encode(), digest_size=_DIGEST_BYTES)
    tokens, size = _packed(key), 4 * chunk_tokens
    running.update(tokens[: 4 * key.start])
    seals = []
    for start in range(4 * key.start, 4 * key.end, size):
        running.update(tokens[start : start + size])
        seals.append(running.digest())
    return seals


def break_seal(memory: torch.Tensor) -> None:
    """Make an object, flat bytes on the host, nobody's before anything is written to it."""
    memory[-SEAL_BYTES:].numpy()[:] = 0


def seal(memory: torch.Tensor, digest: bytes) -> None:
    """Make an object the chunk of this seal, once all its bytes are there."""
    memory[-SEAL_BYTES:].numpy()[:_DIGEST_BYTES] = np.frombuffer(digest, np.uint8)


def seals_at(memory: torch.Tensor, ends: Sequence[int]) -> bytes:
    """Return the seals of objects, one after another, that end at these bytes of flat memory."""
    places = np.asarray(ends, np.int64)[:, None] + np.arange(_DIGEST_BYTES) - SEAL_BYTES
    return bytes(memory.numpy()[places].tobytes())


def _packed(key: Any) -> memoryview:
    """Return a key's tokens, 4 bytes each, as newer LMCache has them."""
    if (packed := getattr(key, "token_bytes", None)) is not None:
        return memoryview(packed)
    try:
        numbers = array("q", key.token_ids)
    except OverflowError:  # an image's place in a prompt is a number of 64 bits without a sign
        numbers = array("q", [token & 0x7FFFFFFFFFFFFFFF for token in key.token_ids])
    return memoryview((np.frombuffer(numbers, np.int64) & 0xFFFFFFFF).astype(">u4").tobytes())
