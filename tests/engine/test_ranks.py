"""Two ranks of one engine on CPU: each restores its bytes, and a fault of one is everybody's miss.

In `make test` in standard mode. `make test-ranks` has layerwise mode too, and requests that wait
for their loads.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.hits import check_failed, check_hit, check_lost, check_restored
from support.ranks_probe import FAULTS, SLOW_S
from support.real_engine import CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe
from support.ways import each_way

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

WAYS = each_way(("standard", "layerwise"), ("always", "async"), often=[("standard", "always")])


@pytest.fixture(scope="module", params=WAYS)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ranks")
    model = make_model(EXACT, directory)
    env = environment(VLLM_CPU_OMP_THREADS_BIND="0|1", OMP_NUM_THREADS="1")
    return printed(run_probe("ranks", model, directory / "disk", *request.param, env=env))


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_both_ranks(report: dict[str, Any], name: str, tier: str):
    check_hit(report[name][tier], cached(name))


def test_a_chunk_that_one_rank_lost_is_no_hit(report: dict[str, Any]):
    check_lost(report["loses a chunk"], FAULTS["loses a chunk"])


def test_a_load_that_fails_on_one_rank_is_recomputed_on_both(report: dict[str, Any]):
    check_failed(report["fails its loads"], FAULTS["fails its loads"])


def test_what_a_step_computes_behind_a_load_that_fails_on_one_rank_is_not_stored(
    report: dict[str, Any],
):
    """On the other rank: each layer's sum brings it what the failed one computes from anything."""
    faulty, afterwards = report["computes behind"]
    assert faulty["right"]
    assert faulty["hit"] == 2 * CHUNK
    check_hit(afterwards, FAULTS["computes behind"] * CHUNK)


def test_one_rank_with_a_slow_disk_lets_its_request_wait_and_costs_no_token(report: dict[str, Any]):
    seen, tokens = report["has a slow disk"], FAULTS["has a slow disk"] * CHUNK
    check_hit(seen["faulty"], tokens)
    assert seen["faulty"]["seconds"] >= SLOW_S
    assert seen["beside"] == {"right": True, "first": 1}  # whoever loads nothing waits for no disk
    check_hit(seen["afterwards"], tokens)


def test_what_one_rank_could_not_write_is_no_hit(report: dict[str, Any]):
    seen, chunks = report["has a full disk"], FAULTS["has a full disk"]
    sound, full = seen["written"]
    assert sound >= chunks  # layerwise, a chunk is several files
    assert full == 0
    check_restored(seen["faulty"], chunks * CHUNK)
    assert seen["faulty"]["hit"] == 0
    check_hit(seen["afterwards"], chunks * CHUNK)  # of the CPU tier
