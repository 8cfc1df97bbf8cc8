"""Names that are remembered are those that LMCache would make."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from lmcache_xpu.cache_engine import chunk_names
from lmcache_xpu.cache_engine.chunk_names import ChunkNames

BLOCK, CHUNK = 4, 8


class Database(ChunkedTokenDatabase):
    """LMCache's; counts what it hashes."""

    def __init__(self, *, partial: bool = False, chunk: int = CHUNK) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=chunk, save_unfull_chunk=partial)
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, (2, 2, chunk, 2, 8))
        super().__init__(config, metadata)
        self.hashed = 0

    def _hash_tokens(self, *args, **kwargs):
        self.hashed += 1
        return super()._hash_tokens(*args, **kwargs)


def request(tokens: list[int], salt: bytes = b"", block: int = BLOCK):
    """As vLLM makes it: a hash per full block, of all tokens up to its end."""
    ends = range(block, len(tokens) + 1, block)
    hashes = [hashlib.sha256(salt + str(tokens[:end]).encode()).digest() for end in ends]
    return SimpleNamespace(all_token_ids=tokens, block_hashes=hashes)


def look_up(database: Database, names: ChunkNames, asked) -> list:
    names.admit(asked)
    return list(database.process_tokens(asked.all_token_ids, make_key=False))


def stock(tokens: list[int], **kwargs) -> list:
    return list(Database(**kwargs).process_tokens(tokens, make_key=False))


TOKENS = list(range(100, 100 + 5 * CHUNK + 3))


def test_a_later_turn_is_hashed_from_where_it_is_new():
    database = Database()
    names = ChunkNames(database, BLOCK)
    assert look_up(database, names, request(TOKENS)) == stock(TOKENS)
    assert database.hashed == 5
    assert look_up(database, names, request(TOKENS)) == stock(TOKENS)
    assert database.hashed == 5
    later = [*TOKENS[: 3 * CHUNK], *range(900, 900 + 2 * CHUNK)]
    assert look_up(database, names, request(later)) == stock(later)
    assert database.hashed == 7
    assert len(names) == 7


def test_the_same_chunk_behind_other_tokens_has_another_name():
    database = Database()
    names = ChunkNames(database, BLOCK)
    look_up(database, names, request(TOKENS))
    other = [1, *TOKENS[1:]]
    assert look_up(database, names, request(other)) == stock(other)
    assert database.hashed == 10


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_lengths(length: int):
    database = Database()
    names = ChunkNames(database, BLOCK)
    for _ in range(2):
        found = look_up(database, names, request(TOKENS[:length]))
        assert found == stock(TOKENS[:length])


def test_what_is_not_the_request_s_own_tokens_is_hashed():
    """A salted request's tokens are others, although vLLM's list says the same."""
    database = Database()
    names = ChunkNames(database, BLOCK)
    look_up(database, names, asked := request(TOKENS))
    salted = [1 << 62, *TOKENS[1:]]
    names.admit(asked)
    assert list(database.process_tokens(salted, make_key=False)) == stock(salted)
    assert database.hashed == 10
    # And whoever asks next, without a request.
    assert list(database.process_tokens(TOKENS, make_key=False)) == stock(TOKENS)
    assert database.hashed == 15


def test_a_request_that_vllm_did_not_hash_is_hashed():
    database = Database()
    names = ChunkNames(database, BLOCK)
    for asked in (request(TOKENS), request(TOKENS, block=2 * BLOCK)):
        asked.block_hashes = asked.block_hashes[: len(TOKENS) // (2 * BLOCK)]
        assert look_up(database, names, asked) == stock(TOKENS)
    assert len(names) == 0


@pytest.mark.parametrize(("partial", "chunk"), [(True, CHUNK), (False, CHUNK + 2)])
def test_chunks_that_end_within_a_block_are_lmcache_s(partial: bool, chunk: int):
    database = Database(partial=partial, chunk=chunk)
    names = ChunkNames(database, BLOCK)
    found = look_up(database, names, request(TOKENS))
    assert found == stock(TOKENS, partial=partial, chunk=chunk)
    assert len(names) == 0


def test_the_oldest_names_are_forgotten(monkeypatch):
    monkeypatch.setattr(chunk_names, "KEPT", 3)
    database = Database()
    names = ChunkNames(database, BLOCK)
    for _ in range(2):
        assert look_up(database, names, request(TOKENS)) == stock(TOKENS)
        assert len(names) == 3


def test_keys_are_made_by_lmcache():
    """Asked for keys, or for a part, it does as it would."""
    database = Database()
    names = ChunkNames(database, BLOCK)
    names.admit(asked := request(TOKENS))
    wanted = list(Database().process_tokens(TOKENS))
    assert list(database.process_tokens(asked.all_token_ids)) == wanted
    assert len(names) == 0


def test_names_of_an_epoch_are_those_of_its_first_token_and_of_no_other_epoch():
    """As `isolation` exchanges it, for all requests alike."""
    database = Database()
    names = ChunkNames(database, BLOCK)
    look_up(database, names, request(TOKENS))
    for first in (2**62, 2**62 + 1):
        asked, exchanged = request(TOKENS), [first, *TOKENS[1:]]
        for hashed in (5, 0):  # the second time they are remembered
            before = database.hashed
            names.admit(asked, f"epoch {first}")
            found = list(database.process_tokens(exchanged, make_key=False))
            assert found == stock(exchanged)
            assert database.hashed - before == hashed
        names.admit(None, f"epoch {first}")  # it has a salt as well
        salted = [7, *TOKENS[1:]]
        assert list(database.process_tokens(salted, make_key=False)) == stock(salted)
        names.admit(asked, f"epoch {first}")  # all but the last tokens are asked for
        fewer = exchanged[:-CHUNK]
        assert list(database.process_tokens(fewer, make_key=False)) == stock(fewer)
