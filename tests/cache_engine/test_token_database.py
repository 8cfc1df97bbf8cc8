"""The keys that a look-up pinned name the chunks of the load, and nothing else."""

from __future__ import annotations

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.cache_engine.token_database import TokenDatabase
from lmcache_xpu.versions.lmcache import ChunkedTokenDatabase

CHUNK = 8
TOKENS = list(range(100, 100 + 5 * CHUNK + 3))


class Counting(TokenDatabase):
    """Ours, and how often it hashes tokens and makes keys."""

    hashed = keyed = 0

    def _hash_tokens(self, *args, **kwargs):
        self.hashed += 1
        return super()._hash_tokens(*args, **kwargs)

    def _make_key_by_hash(self, *args, **kwargs):
        self.keyed += 1
        return super()._make_key_by_hash(*args, **kwargs)


def databases(*, partial: bool = False) -> tuple[ChunkedTokenDatabase, Counting]:
    """LMCache's and ours."""
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, save_unfull_chunk=partial)
    shape = (2, 2, CHUNK, 2, 8)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, shape)
    return ChunkedTokenDatabase(config, metadata), Counting(config, metadata)


def pinned(plain: ChunkedTokenDatabase, options=None) -> list:
    """The keys of a look-up of all tokens."""
    return [key for *_, key in plain.process_tokens(TOKENS, request_configs=options)]


def chunks(database, loaded: int, skipped: int = 0, options=None) -> list:
    mask = torch.ones(loaded, dtype=torch.bool)
    mask[:skipped] = False
    tokens = TOKENS[:loaded]
    return list(database.process_tokens(tokens=tokens, mask=mask, request_configs=options))


@pytest.mark.parametrize(
    ("loaded", "partial"),
    [(CHUNK, False), (3 * CHUNK, False), (5 * CHUNK, False), (len(TOKENS), True)],
)
@pytest.mark.parametrize("skipped", [0, CHUNK])
def test_the_same_keys_without_hashing_again(loaded: int, partial: bool, skipped: int):
    options = {"lmcache.tag.user": "a"}
    plain, ours = databases(partial=partial)
    with ours.reuse(pinned(plain, options)):
        assert chunks(ours, loaded, skipped, options) == chunks(plain, loaded, skipped, options)
    assert (ours.hashed, ours.keyed) == (0, 0)


@pytest.mark.parametrize("loaded", [CHUNK + 1, len(TOKENS) - 1])
@pytest.mark.parametrize("partial", [False, True])
def test_what_ends_inside_of_a_chunk_is_hashed(loaded: int, partial: bool):
    plain, ours = databases(partial=partial)
    keys = pinned(plain)[: loaded // CHUNK]  # no look-up has promised more
    with ours.reuse(keys):
        assert chunks(ours, loaded) == chunks(plain, loaded)
    assert ours.hashed > 0


def test_more_than_was_looked_up_is_hashed():
    plain, ours = databases()
    with ours.reuse(pinned(plain)[:2]):
        assert chunks(ours, 3 * CHUNK) == chunks(plain, 3 * CHUNK)
    assert ours.hashed == 3


def test_look_ups_of_other_requests_during_a_load_get_keys_of_their_own():
    plain, ours = databases()
    other = list(plain.process_tokens([token + 1 for token in TOKENS], make_key=False))
    by_hash = {"hashes": [name for *_, name in other], "offsets": [CHUNK] * len(other)}
    with ours.reuse(pinned(plain)):
        assert list(ours.process_tokens(**by_hash)) == list(plain.process_tokens(**by_hash))


def test_hashes_are_no_keys():
    plain, ours = databases()
    with ours.reuse(pinned(plain)):
        hashes = list(ours.process_tokens(TOKENS, make_key=False))
    assert hashes == list(plain.process_tokens(TOKENS, make_key=False))


def test_what_an_error_leaves_behind_names_no_other_load():
    plain, ours = databases()
    with pytest.raises(RuntimeError, match="planted"), ours.reuse(pinned(plain)):
        raise RuntimeError("planted")
    other = [token + 1 for token in TOKENS]
    assert list(ours.process_tokens(other)) == list(plain.process_tokens(other))
