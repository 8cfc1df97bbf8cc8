"""The keys of a look-up name the chunks of the load, and nothing else."""

from __future__ import annotations

import pytest
import torch
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from lmcache_xpu.cache_engine.lookup_keys import ChunkKeys

CHUNK = 8
TOKENS = list(range(100, 100 + 5 * CHUNK + 3))


class Memory:
    """Of a chunk; whoever gets it has a reference."""

    def __init__(self) -> None:
        self.references = 1

    def ref_count_down(self) -> None:
        self.references -= 1

    def get_size(self) -> int:
        return 8


class Storage:
    """Has every chunk but those of `lost` keys, in one tier."""

    def __init__(self) -> None:
        self.lost: list = []
        self.asked: list[tuple[list, str]] = []
        self.given: list[Memory] = []

    def get_block_mapping(self, chunks):
        return {"tier": chunks}

    def batched_get(self, keys, location):
        self.asked.append((keys, location))
        found = [None if key in self.lost else Memory() for key in keys]
        self.given += [memory for memory in found if memory is not None]
        return found


class Engine:
    """LMCache's engine: what it looks up is there, and it loads by the keys that it makes."""

    def __init__(self, *, partial: bool = False) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, save_unfull_chunk=partial)
        shape = (2, 2, CHUNK, 2, 8)
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, shape)
        self.token_database = ChunkedTokenDatabase(config, metadata)
        self.hashed = 0
        self.unpinned: list[str] = []
        self.lookup_pins: dict[str, dict[str, list]] = {}
        self.storage_manager = Storage()
        self.named = self.looped = 0
        for attribute in ("_hash_tokens", "_make_key_by_hash"):
            self._count(attribute)

    def _count(self, attribute):
        real = getattr(self.token_database, attribute)

        def count(*args, **kwargs):
            self.hashed += attribute == "_hash_tokens"
            self.named += attribute == "_make_key_by_hash"
            return real(*args, **kwargs)

        setattr(self.token_database, attribute, count)

    def lookup(self, hashes=None, offsets=None, lookup_id=None, request_configs=None):
        chunks = self.token_database.process_tokens(
            hashes=hashes, offsets=offsets, request_configs=request_configs
        )
        return max((end for _, end, _ in chunks), default=0)

    def lookup_unpin(self, lookup_id):
        self.unpinned.append(lookup_id)

    def retrieve(self, tokens, mask=None, **kwargs):
        if kwargs.get("fails"):
            raise RuntimeError("planted")
        self.found = torch.zeros(len(tokens), dtype=torch.bool)
        chunks, self.size = self._process_tokens_internal(tokens, mask, self.found, **kwargs)
        return [(start, end, key) for key, _, start, end in chunks]

    def _process_tokens_internal(self, *args, **kwargs):
        self.looped += 1
        return LMCacheEngine._process_tokens_internal(self, *args, **kwargs)

    remove_after_retrieve = False


def asked(*, partial: bool = False, options=None) -> tuple[Engine, Engine, ChunkKeys]:
    """An engine as LMCache has it, and one whose scheduler has looked up request "one"."""
    plain, engine = Engine(partial=partial), Engine(partial=partial)
    chunks = list(engine.token_database.process_tokens(TOKENS, make_key=False))
    known = ChunkKeys(engine)
    engine.lookup(
        hashes=[chunk for _, _, chunk in chunks],
        offsets=[end - start for start, end, _ in chunks],
        lookup_id="one",
        request_configs=options,
    )
    engine.hashed = engine.named = 0
    return plain, engine, known


@pytest.mark.parametrize(
    ("loaded", "partial"),
    [(CHUNK, False), (3 * CHUNK, False), (5 * CHUNK, False), (len(TOKENS), True)],
)
@pytest.mark.parametrize("skipped", [0, CHUNK])
def test_the_same_keys_without_hashing_again(loaded: int, partial: bool, skipped: int):
    options = {"lmcache.tag.user": "a"}
    plain, engine, known = asked(partial=partial, options=options)
    mask = torch.ones(loaded, dtype=torch.bool)
    mask[:skipped] = False
    given = {"req_id": "one", "request_configs": options}
    assert engine.retrieve(TOKENS[:loaded], mask, **given) == plain.retrieve(
        TOKENS[:loaded], mask, **given
    )
    assert plain.hashed == -(-loaded // CHUNK)
    assert (engine.hashed, engine.named) == (0, 0)
    assert len(known) == 0


@pytest.mark.parametrize("options", [{}, {"lmcache.tag.user": "b"}])
def test_other_options_are_other_keys(options):
    plain, engine, _ = asked(options={"lmcache.tag.user": "a"})
    given = {"req_id": "one", "request_configs": options}
    assert engine.retrieve(TOKENS[:CHUNK], **given) == plain.retrieve(TOKENS[:CHUNK], **given)


def test_no_options_are_the_same_as_empty_ones():
    _, engine, _ = asked(options=None)
    engine.retrieve(TOKENS[:CHUNK], req_id="one", request_configs={})
    assert engine.named == 0


@pytest.mark.parametrize(
    ("loaded", "request_id"), [(CHUNK + 1, "one"), (CHUNK, "other"), (len(TOKENS) - 1, "one")]
)
def test_other_lengths_and_other_requests_are_hashed(loaded: int, request_id: str):
    plain, engine, _ = asked()
    wanted = plain.retrieve(TOKENS[:loaded])
    assert engine.retrieve(TOKENS[:loaded], req_id=request_id) == wanted
    assert engine.hashed == plain.hashed


def test_keys_are_used_once():
    """A request of the same name may have other tokens."""
    plain, engine, _ = asked()
    engine.retrieve(TOKENS[:CHUNK], req_id="one")
    other = [token + 1 for token in TOKENS[:CHUNK]]
    assert engine.retrieve(other, req_id="one") == plain.retrieve(other)


@pytest.mark.parametrize("lost", [None, 2])
@pytest.mark.parametrize("skipped", [0, CHUNK])
def test_memory_of_what_one_tier_has_promised_comes_at_once(skipped: int, lost: int | None):
    """The same as from LMCache's loop, and if a chunk is gone by now, from its loop."""
    plain, engine, _ = asked()
    mask = torch.ones(4 * CHUNK, dtype=torch.bool)
    mask[:skipped] = False
    keys = [key for _, _, key in plain.token_database.process_tokens(TOKENS)]
    for one in (plain, engine):
        one.lookup_pins["one"] = {"tier": []}
        one.storage_manager.lost = [] if lost is None else [keys[lost]]
    wanted = plain.retrieve(TOKENS[: 4 * CHUNK], mask, req_id="one")
    assert engine.retrieve(TOKENS[: 4 * CHUNK], mask, req_id="one") == wanted
    assert engine.found.tolist() == plain.found.tolist()
    assert engine.size == plain.size == 8 * len(wanted)
    assert len(wanted) == (4 if lost is None else lost) - skipped // CHUNK
    assert engine.looped == (lost is not None)
    held = [memory.references for memory in engine.storage_manager.given]
    assert sum(held) == len(wanted)
    assert {location for _, location in engine.storage_manager.asked} == {"tier"}


def test_a_request_that_is_given_up_is_forgotten():
    _, engine, known = asked()
    assert len(known) == 1
    engine.lookup_unpin("one")
    assert len(known) == 0
    assert engine.unpinned == ["one"]


def test_chunks_of_a_load_before_its_step_stay_pinned():
    _, engine, known = asked()
    with known.pinned():
        engine.lookup_unpin("one")
    assert len(known) == 0
    assert engine.unpinned == []
    engine.lookup_unpin("one")  # at the end of the step
    assert engine.unpinned == ["one"]
    with pytest.raises(RuntimeError, match="planted"), known.pinned():
        raise RuntimeError("planted")
    engine.lookup_unpin("two")
    assert engine.unpinned == ["one", "two"]


def test_what_an_error_leaves_behind_names_no_other_load():
    plain, engine, _ = asked()
    with pytest.raises(RuntimeError, match="planted"):
        engine.retrieve(TOKENS, req_id="one", fails=True)
    other = [token + 1 for token in TOKENS]
    assert engine.retrieve(other, req_id="two") == plain.retrieve(other)
    assert list(engine.token_database.process_tokens(other)) == list(
        plain.token_database.process_tokens(other)
    )


def test_nothing_found_is_nothing_kept():
    _, engine, known = asked()
    engine.lookup_unpin("one")
    engine.lookup(hashes=[], offsets=[], lookup_id="two")
    assert len(known) == 0
