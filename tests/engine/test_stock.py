"""LMCache's own engine end to end on CPU: a real vLLM, our GPU connectors and our disk tier.

Layer by layer as `serve --layerwise` starts it, and whole chunks at once by LMCache's stock name. A
reported hit proves nothing, so these compare bytes and tokens, and show that both would differ if a
hit wrote the wrong thing.
"""

from __future__ import annotations

import pytest
from packaging.version import Version
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe
from support.ways import each_way

from lmcache_xpu import versions
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

# Older vLLM counts nothing in a step that gives no answer, such as one whose loads all failed.
FORGETS_STEPS = Version(str(versions.installed().vllm)) < Version("0.28")

MODES = ("stock", "layerwise")
WAYS = each_way(MODES, ("default", "newer"), often=tuple((mode, "default") for mode in MODES))


def probe(step: str, *args: str) -> dict:
    env = environment() if step == "restart" else None  # with another hash seed
    process = run_probe("stock", step, *args, timeout=600, env=env)
    # LMCache's word for a pin that another request had, and that was taken back in its stead.
    assert "Double unpin" not in process.stdout + process.stderr
    return printed(process)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(EXACT, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module", params=WAYS)
def place(request, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    directory = tmp_path_factory.mktemp("-".join(request.param))
    return model, str(directory / "disk"), str(directory / "reference.json"), *request.param


@pytest.fixture(scope="module")
def stored(place: tuple[str, ...]) -> dict:
    return probe("store", *place)


@pytest.fixture(scope="module")
def restarted(place: tuple[str, ...], stored: dict) -> dict:
    return probe("restart", *place)


def test_this_is_what_runs(stored: dict, place: tuple[str, ...]):
    newer = place[-1] == "newer"
    assert stored["runs"] == {
        "connector": "StockScheduler",
        "runner": "vllm.v1.worker.cpu.model_runner" if newer else "vllm.v1.worker.cpu_model_runner",
        "ahead": newer,
    }


@pytest.mark.parametrize("name", LENGTHS)
def test_a_cpu_hit_restores_every_byte_and_gives_the_recomputed_tokens(stored: dict, name: str):
    hit = stored["prompts"][name]
    assert len(hit["recompute"]) == 24
    assert hit["cpu"]["answer"] == hit["recompute"]
    assert hit["cpu"]["hit"] == cached(name)
    # Every cached block but the one whose last token vLLM recomputes on a full hit.
    assert hit["cpu"]["restored"] >= cached(name) // BLOCK


@pytest.mark.parametrize("turn", ["prompts", "again"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_disk_hit_after_a_restart_does_too(stored: dict, restarted: dict, name: str, turn: str):
    """Twice: a load that kept pins or locks of the first would fail or hang in the second."""
    hit = restarted[turn][name]
    assert hit["answer"] == stored["prompts"][name]["recompute"]
    assert hit["hit"] == cached(name)
    assert hit["restored"] >= cached(name) // BLOCK
    assert restarted["disk_hits"] >= sum(length // CHUNK for length in LENGTHS.values())


def test_chunks_in_several_tiers_are_served_right(restarted: dict):
    """Layer by layer LMCache loads from one: the first time they are computed instead."""
    assert restarted["forgot"] > 0
    for once, twice, computed, hit in restarted["scattered"]:
        assert once == twice == computed
        assert hit > 0


def test_no_reference_or_pin_outlives_its_request(stored: dict, restarted: dict):
    """The hot cache itself holds one reference; more would never be evicted, fewer be freed."""
    assert stored["counts"] == [[1, 0]]
    assert restarted["counts"] == [[1, 0]]


def test_the_cpu_tier_takes_what_it_says(stored: dict, place: tuple[str, ...]):
    """Asked of PyTorch, or allocated by us, as on an Intel GPU what is too large to be pinned."""
    assert stored["pool"] == [2**28, place[-2] == "stock"]


def test_many_at_once_get_their_own_tokens(stored: dict):
    """What is preempted loads again."""
    for crowd_round in stored["crowd"]["rounds"]:
        assert all(crowd_round["right"])
        assert crowd_round["preempted"] > 0
        assert crowd_round["hit"] > stored["crowd"]["tokens"] / 2


@pytest.mark.parametrize("fault", ["shifted", "without values"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_wrong_load_would_be_seen(stored: dict, name: str, fault: str):
    hit = stored["prompts"][name]
    assert hit[fault]["hit"] == cached(name)  # reported as a hit all the same
    assert hit[fault]["answer"] != hit["recompute"]
    assert hit[fault]["restored"] < cached(name) // BLOCK


@pytest.mark.parametrize("name", LENGTHS)
def test_a_load_that_fails_is_recomputed(stored: dict, name: str):
    hit = stored["prompts"][name]
    assert hit["failing"]["answer"] == hit["recompute"]
    assert hit["failing"]["restored"] >= cached(name) // BLOCK


def test_turns_whose_loads_fail_are_computed_and_leave_nothing_wrong_behind(stored: dict):
    """A step that was on its way when a load failed stores nothing, and its tokens are dropped."""
    stumbled = stored["stumbled"]
    assert stumbled["failed"] > 0
    assert stumbled["hit"] >= 4 * CHUNK or FORGETS_STEPS  # promised
    assert stumbled["failing"] == stumbled["cold"]
    assert stumbled["afterwards"] == stumbled["cold"]


def test_a_request_with_a_salt_finds_and_stores_nothing(stored: dict):
    """LMCache's keys have no salt. Adapters, images and embeddings: see stock/test_scheduler.py."""
    assert stored["salts"] == {"hit": 0, "stored": 0}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ["weights", "reset"])
def test_nothing_is_found_or_stored_after_other_weights_or_a_reset(
    model: str, mode: str, change: str
):
    seen = probe("stop", model, "none", change, mode, "default")
    assert seen["before"] == cached("inside")
    # A look-up before the worker's word has come is refused there, and computed.
    assert seen["hit"] <= (cached("inside") if change == "weights" else 0)
    assert seen["stored"] == 0
    assert seen["right"] == [True, True]
    assert seen["changed"] is (change == "weights")


def test_a_tier_that_does_not_open_ends_the_engine_with_the_reason(model: str):
    """LMCache alone would go on without it; and its threads would keep a failed process alive."""
    done = run_probe("stock", "broken", model, "unused", "unused", "stock", "default")
    assert done.returncode == 1
    assert "SeamError: found LMCache tiers ['LocalCPUBackend']" in done.stderr
    assert "Failed to create backend disk" in done.stdout + done.stderr
