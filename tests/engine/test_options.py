"""LMCache's options that are served, in an engine: what they change, and that no byte does."""

from __future__ import annotations

import pytest
from support.real_engine import BLOCK, CHUNK
from support.scripts import printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["stock"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    model = make_model(EXACT, tmp_path_factory.mktemp("models"))
    disk = tmp_path_factory.mktemp("disk") / request.param
    return printed(run_probe("options", model, disk, request.param))


def test_what_a_small_pool_has_evicted_comes_back_from_disk(report):
    """It evicts by LFU."""
    for prompt in report["long"]:
        assert prompt["right"]
        assert prompt["hit"] == 4 * CHUNK
        assert prompt["restored"] >= 4 * CHUNK // BLOCK


def test_a_hit_below_min_retrieve_tokens_is_computed(report):
    assert (report["short"]["right"], report["short"]["hit"]) == (True, 0)


def test_what_is_less_important_than_priority_limit_is_not_stored(report):
    assert (report["unimportant"]["right"], report["unimportant"]["hit"]) == (True, 0)
    assert (report["important"]["right"], report["important"]["hit"]) == (True, 2 * CHUNK)
    assert report["important"]["restored"] >= 2 * CHUNK // BLOCK


def test_the_kv_of_an_answer_is_stored_with_save_decode_cache(report):
    assert report["answer"] == {"right": True, "hit": 2 * CHUNK}


def test_pythons_collector_stays_off_if_it_was_switched_off(report):
    assert report["collects"] is False
