"""Names that are remembered are those that LMCache would make."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.cache_engine import chunk_names
from lmcache_xpu.cache_engine.chunk_names import ChunkNames
from lmcache_xpu.versions.lmcache import ChunkedTokenDatabase

BLOCK, CHUNK = 4, 8
TOKENS = list(range(100, 100 + 5 * CHUNK + 3))


class Counting(ChunkNames):
    """Ours, and how often it hashes tokens."""

    hashed = 0

    def _hash_tokens(self, *args, **kwargs):
        self.hashed += 1
        return super()._hash_tokens(*args, **kwargs)


def settings(chunk: int, *, partial: bool) -> tuple[Any, Any]:
    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk, save_unfull_chunk=partial)
    return config, LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, (2, 2, chunk, 2, 8))


def database(*, partial: bool = False, chunk: int = CHUNK) -> Counting:
    return Counting(*settings(chunk, partial=partial), BLOCK)


def request(tokens: list[int], *, block: int = BLOCK, images=(), embeds=None, hash_salt=b"") -> Any:
    """As vLLM makes it: a hash per full block, of all tokens up to its end."""
    ends = range(block, len(tokens) + 1, block)
    hashes = [hashlib.sha256(hash_salt + str(tokens[:end]).encode()).digest() for end in ends]
    return SimpleNamespace(
        all_token_ids=tokens, block_hashes=hashes, mm_features=images, prompt_embeds=embeds
    )


def look_up(names: ChunkNames, asked: Any, tokens: list[int] | None = None, salt="") -> list:
    with names.remember(asked, salt):
        tokens = asked.all_token_ids if tokens is None else tokens
        return list(names.process_tokens(tokens, make_key=False))


def stock(tokens: list[int], *, partial: bool = False, chunk: int = CHUNK) -> list:
    plain = ChunkedTokenDatabase(*settings(chunk, partial=partial))
    return list(plain.process_tokens(tokens, make_key=False))


def test_a_later_turn_is_hashed_from_where_it_is_new():
    names = database()
    assert look_up(names, request(TOKENS)) == stock(TOKENS)
    assert names.hashed == 5
    assert look_up(names, request(TOKENS)) == stock(TOKENS)
    assert names.hashed == 5
    later = [*TOKENS[: 3 * CHUNK], *range(900, 900 + 2 * CHUNK)]
    assert look_up(names, request(later)) == stock(later)
    assert names.hashed == 7
    assert len(names) == 7


def test_the_same_chunk_behind_other_tokens_has_another_name():
    names = database()
    look_up(names, request(TOKENS))
    other = [1, *TOKENS[1:]]
    assert look_up(names, request(other)) == stock(other)
    assert names.hashed == 10


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_lengths(length: int):
    names = database()
    for _ in range(2):
        assert look_up(names, request(TOKENS[:length])) == stock(TOKENS[:length])


def test_a_part_of_the_tokens_is_named_by_the_same_hashes():
    """A user's setting leaves out the last tokens of each look-up."""
    names = database()
    look_up(names, request(TOKENS))
    fewer = TOKENS[: 3 * CHUNK + 1]
    assert look_up(names, request(TOKENS), fewer) == stock(fewer)
    assert names.hashed == 5


def test_each_salt_has_names_of_its_own():
    """As `cache_salt` exchanges the first token: of a request's salt, of its epoch."""
    names = database()
    assert look_up(names, request(TOKENS)) == stock(TOKENS)
    for first in (1 << 62, (1 << 62) + 1):
        exchanged = [first, *TOKENS[1:]]
        for hashed in (5, 0):  # the second time they are remembered
            before = names.hashed
            assert look_up(names, request(TOKENS), exchanged, f"salt {first}") == stock(exchanged)
            assert names.hashed - before == hashed


@pytest.mark.parametrize(
    "unlike",
    [
        {"images": ["an image"]},
        {"embeds": torch.zeros(1)},
        {"block": 2 * BLOCK},
        {"block": 10**6},  # vLLM hashes nothing
    ],
    ids=["images", "embeddings", "other blocks", "no hashes"],
)
def test_what_the_hashes_do_not_name_is_hashed(unlike: dict[str, Any]):
    names = database()
    for _ in range(2):
        assert look_up(names, request(TOKENS, **unlike)) == stock(TOKENS)
    assert (names.hashed, len(names)) == (10, 0)


def test_whoever_asks_without_a_request_is_not_answered_from_memory():
    names = database()
    look_up(names, request(TOKENS))
    other = [1, *TOKENS[1:]]
    assert list(names.process_tokens(other, make_key=False)) == stock(other)
    assert look_up(names, None, other) == stock(other)


@pytest.mark.parametrize(("partial", "chunk"), [(True, CHUNK), (False, CHUNK + 2)])
def test_chunks_that_end_within_a_block_are_lmcaches(partial: bool, chunk: int):
    names = database(partial=partial, chunk=chunk)
    assert look_up(names, request(TOKENS)) == stock(TOKENS, partial=partial, chunk=chunk)
    assert len(names) == 0


def test_the_oldest_names_are_forgotten(monkeypatch):
    monkeypatch.setattr(chunk_names, "MOST_NAMES", 3)
    names = database()
    for _ in range(2):
        assert look_up(names, request(TOKENS)) == stock(TOKENS)
        assert len(names) == 3


def test_keys_are_made_by_lmcache():
    names = database()
    keys = list(ChunkedTokenDatabase(*settings(CHUNK, partial=False)).process_tokens(TOKENS))
    with names.remember(request(TOKENS), ""):
        assert list(names.process_tokens(TOKENS)) == keys
    assert len(names) == 0
