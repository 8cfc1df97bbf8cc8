"""A prompt is found where it should be, to the token."""

from __future__ import annotations

import pytest
from engine import CHUNK, Engine
from hits import CPU_CHUNKS, DISK_CHUNKS, counted, fill, hit
from leftovers import CLEAN, leaks
from prompts import tokens, whole

pytestmark = pytest.mark.promise("2 tiers")


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(CHUNK - 1, marks=pytest.mark.fails_without("chunk")),
        *(
            pytest.param(length, marks=pytest.mark.fails_without("offload"))
            for length in (CHUNK, 4 * CHUNK, 4 * CHUNK + 1, 4 * CHUNK + 77)
        ),
    ],
)
def test_a_prompt_is_found_in_the_cpu_tier(engine: Engine, length: int):
    """Seen to fail without tiers; what is shorter than a chunk, with chunks of half the size."""
    prompt = tokens(("cpu", length), length)
    assert hit(engine, prompt) == (0, 0)
    engine.settle()
    assert hit(engine, prompt) == (whole(length) if length >= CHUNK else 0, 0)


@pytest.mark.fails_without("disk", "roomy")
def test_what_the_cpu_tier_evicted_is_found_on_disk(small: Engine):
    """Seen to fail without a disk tier, and with a CPU tier that does not evict."""
    engine = small
    prompt = tokens("evicted", 4 * CHUNK + 77)
    engine.ask(prompt)
    fill(engine, "evicts cpu", CPU_CHUNKS)
    assert hit(engine, prompt) == (4 * CHUNK, 4 * CHUNK)


@pytest.mark.fails_without("evict")
def test_what_both_tiers_evicted_is_computed_again(small: Engine):
    """Both are full now and go on storing. Seen to fail with a disk tier that ignores its size."""
    engine = small
    prompt = tokens("gone", 4 * CHUNK + 77)
    engine.ask(prompt)
    fill(engine, "evicts all", DISK_CHUNKS + 8)
    assert hit(engine, prompt) == (0, 0)
    limit = engine.metrics().sum("lmcache_xpu_disk_limit_bytes")
    used = engine.metrics().sum("lmcache_xpu_disk_used_bytes")
    assert 0.9 * limit < used <= limit
    assert hit(engine, prompt)[0] == 4 * CHUNK  # stored again just now


@pytest.mark.fails_without("blocks")
@pytest.mark.fails_without("guard", mode="layerwise")
def test_a_prompt_in_two_tiers_is_found_in_both(small: Engine, mode: str):
    """Half of it or more evicted from the CPU tier. LMCache's layerwise loads come from one tier.

    There the rest is computed again (see known-limits.md), and the answer is the same.
    Seen to fail with loads that leave out a block, and in layerwise mode with errors let through:
    an assertion of LMCache ends that engine.
    """
    engine = small
    prompt = tokens("two tiers", 8 * CHUNK + 9)
    expected = engine.recompute(prompt).token_ids
    engine.ask(prompt)
    fill(engine, "half of it", 16)
    engine.ask(tokens("the other half stays", 4 * CHUNK + 1), max_tokens=1)
    engine.settle()
    answer, hits, from_disk = counted(engine, prompt)
    assert answer.token_ids == expected
    if mode == "standard":
        assert hits == 8 * CHUNK
        assert 0 < from_disk <= 8 * CHUNK
    engine.settle()
    engine.forget()
    assert engine.ask(prompt).token_ids == expected


@pytest.mark.fails_without("blocks", "references")
def test_a_chunk_whose_layers_lie_in_two_tiers_is_loaded_from_the_disk(engine: Engine, mode: str):
    """LMCache evicts them from the CPU tier one by one. The look-up leaves no pins there.

    Seen to fail with loads that leave out a block, with references kept, and with a look-up that
    pins the layers which are in memory.
    """
    if mode == "standard":
        pytest.skip("a chunk of the standard mode is one piece")
    prompt = tokens("split", 3 * CHUNK + 9)
    expected = engine.recompute(prompt).token_ids
    engine.ask(prompt)
    engine.settle()
    engine.forget()
    assert engine.inside("split") > 0
    answer, hits, from_disk = counted(engine, prompt)
    assert (hits, from_disk) == (3 * CHUNK, 3 * CHUNK)
    assert answer.token_ids == expected
    assert leaks(engine) == CLEAN
