"""Many requests in a real vLLM on CPU with a cache in its process, and tiers that lose parts.

A reported hit proves nothing, so these compare bytes and tokens, and show that both would differ
if a hit wrote the wrong thing.
"""

from __future__ import annotations

import itertools

import pytest
from packaging.version import Version
from support.engine_probe import OWN_BLOCKS, QUESTIONS, WHOLE
from support.engine_tiers import CHUNKS, LONGER, PARTS
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached
from support.scripts import printed, run_probe

from lmcache_xpu import versions
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

# Older vLLM counts nothing in a step that gives no answer, such as one whose loads all failed.
FORGETS_STEPS = Version(str(versions.installed().vllm)) < Version("0.28")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def model(directory) -> str:
    return str(make_model(EXACT, directory))


@pytest.fixture(scope="module")
def memory(model: str) -> dict:
    """With memory for all prompts."""
    return printed(run_probe("engine", "memory", model, "none"))


@pytest.fixture(scope="module")
def tiers(model: str, directory) -> dict:
    """With memory for a few chunks, and a disk."""
    return printed(run_probe("engine", "tiers", model, directory / "disk"))


@pytest.fixture(scope="module", params=["memory", "tiers"])
def report(request: pytest.FixtureRequest) -> dict:
    return request.getfixturevalue(request.param)


def is_right(asked: dict, hit: int) -> bool:
    return asked == {"right": True, "hit": hit}


@pytest.mark.parametrize("fault", ["shifted", "without values"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_wrong_load_would_be_seen(memory: dict, name: str, fault: str):
    hit = memory["prompts"][name]
    assert len(hit["recompute"]) == 24
    assert hit["sound"]["answer"] == hit["recompute"]
    assert hit["sound"]["restored"] >= cached(name) // BLOCK
    assert hit[fault]["hit"] == cached(name)  # reported as a hit all the same
    assert hit[fault]["answer"] != hit["recompute"]
    assert hit[fault]["restored"] < cached(name) // BLOCK


@pytest.mark.parametrize("name", LENGTHS)
def test_a_load_that_fails_is_recomputed(memory: dict, name: str):
    hit = memory["prompts"][name]
    assert hit["failing"]["answer"] == hit["recompute"]
    assert hit["failing"]["restored"] >= cached(name) // BLOCK


def test_turns_whose_loads_fail_are_computed_and_leave_nothing_wrong_behind(memory: dict):
    """A step that was on its way when a load failed stores nothing, and its tokens are dropped."""
    stumbled = memory["stumbled"]
    assert stumbled["failed"] > 0
    assert stumbled["hit"] >= 4 * CHUNK or FORGETS_STEPS  # promised
    assert stumbled["failing"] == stumbled["cold"]
    assert stumbled["afterwards"] == stumbled["cold"]


def test_many_at_once_get_their_own_tokens(report: dict):
    """Also where they take each other's memory."""
    for crowd_round in report["crowd"]["rounds"]:
        assert all(crowd_round["right"])
        assert crowd_round["hit"] > 0
    assert report["last"]["ways"]["step"] > 0


def test_with_memory_for_all_of_them_most_tokens_are_hit(memory: dict):
    """Loads begin one by one while their steps are decided on; what is preempted loads again."""
    for crowd_round in memory["crowd"]["rounds"]:
        assert crowd_round["preempted"] > 0
        assert crowd_round["hit"] > memory["crowd"]["tokens"] / 2


@pytest.mark.parametrize("way", ["forgotten", "kept", "by turns"])
def test_each_turn_of_a_conversation_hits_what_the_turns_before_stored(memory: dict, way: str):
    """Whole chunks of questions and answers, by whom they were asked; vLLM's own cache has some."""
    turns = memory["conversations"][way]
    assert len(turns) == len(QUESTIONS)
    for before, seen in itertools.pairwise(turns):
        # Of an answer's last token there is no KV.
        stored = (before["length"] + 23) // CHUNK * CHUNK
        own = (before["length"] + 23) // BLOCK * BLOCK
        assert seen["right"]
        assert seen["hit"] + seen["own"] == max(stored, own if seen["own"] else 0)
        assert way != "kept" or seen["own"] == own
        assert way != "forgotten" or seen["own"] == 0
    assert turns[0]["right"]


def test_what_vllm_s_own_cache_lacks_of_a_hit_is_loaded(memory: dict):
    hit = WHOLE // CHUNK * CHUNK
    for blocks, seen in zip(OWN_BLOCKS, memory["beginnings"], strict=True):
        assert seen["right"]
        assert seen["own"] == blocks * BLOCK
        assert seen["hit"] == hit - blocks * BLOCK
        # Blocks of vLLM's own came of steps of other lengths, which may round otherwise.
        assert seen["restored"] >= seen["hit"] // BLOCK


@pytest.mark.parametrize("name", PARTS)
def test_what_memory_lacks_comes_from_the_disk(tiers: dict, name: str):
    """A hit ends at the first chunk that both lack; what was computed behind it is stored."""
    memory, disk = PARTS[name]
    there = {*memory, *disk}
    hit = next((chunk for chunk in range(CHUNKS) if chunk not in there), CHUNKS)
    first, again = tiers["parts"][name]
    assert is_right(first, hit * CHUNK)
    assert is_right(again, CHUNKS * CHUNK)


def test_a_full_disk_costs_hits_alone(tiers: dict):
    seen = tiers["full disk"]
    assert is_right(seen["memory"], 3 * CHUNK)
    assert is_right(seen["nobody"], 0)
    assert is_right(seen["stored"], 0)
    assert is_right(seen["disk"], 3 * CHUNK)


def test_a_full_memory_costs_hits_alone(tiers: dict):
    seen = tiers["full memory"]
    assert seen["held"] > 0
    assert all(is_right(asked, 0) for asked in seen["held by others"])
    new, new_again, on_disk, on_disk_again = seen["given back"]
    assert is_right(new, 0)
    for asked in (new_again, on_disk, on_disk_again):
        assert is_right(asked, 3 * CHUNK)


def test_a_prompt_longer_than_memory_hits_as_much_as_fits(tiers: dict):
    for asked in tiers["longer"]:
        assert asked["right"]
        assert 0 < asked["hit"] < LONGER
        assert asked["hit"] % CHUNK == 0


def test_a_conversation_goes_on_from_the_disk(tiers: dict):
    for before, seen in itertools.pairwise(tiers["conversation"]):
        assert seen["right"]
        assert seen["hit"] == (before["length"] + 23) // CHUNK * CHUNK


def test_no_lock_outlives_its_request(report: dict):
    """A chunk that is locked would never be evicted."""
    assert report["last"]["locks"] == {"read": 0, "write": 0}


def test_a_reset_gives_all_of_the_memory_back(report: dict):
    assert report["last"]["reset"] is True
    assert report["last"]["used"] == 0


def test_the_cpu_tier_takes_what_it_says(memory: dict):
    assert memory["last"]["room"] == 2**28


def test_a_tier_that_does_not_open_ends_the_engine_with_the_reason(model: str):
    """LMCache's threads would keep a failed process alive."""
    done = run_probe("engine", "broken", model, "/dev/null/no-directory")
    assert done.returncode == 1
    assert "SettingsError" in done.stderr
    assert "/dev/null/no-directory" in done.stderr
