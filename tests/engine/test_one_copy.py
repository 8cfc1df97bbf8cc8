"""Ranks that hold the same, on CPU: one CPU tier, from which all load, and faults of the first two.

The first rank keeps the chunks, and lends its memory to the others. Four ranks are of one head, and
of two, where the third rank keeps chunks for itself and the fourth. `make test-ranks` runs this;
`make test` has the ranks' memory without an engine (kv_connector/test_pool_sharing.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from support.hits import check_failed, check_hit, check_lost, check_one_copy
from support.one_copy_probe import FAULTS
from support.real_engine import CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe, threads_of_ranks
from support.tiny_models import with_kv_heads
from support.ways import each_way

pytestmark = pytest.mark.engine

WAYS = [
    *each_way(("standard", "layerwise"), ("always", "async"), ("2",), ("1",), often=[]),
    *each_way(("standard", "layerwise"), ("always",), ("4",), ("1", "2"), often=[]),
]


@pytest.fixture(scope="module", params=WAYS)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("copies")
    *_, ranks, heads = request.param
    model = with_kv_heads(int(heads), directory)
    env = environment(**threads_of_ranks(int(ranks)))
    done = run_probe("one_copy", model, directory / "disk", *request.param, env=env)
    return {"ranks": int(ranks), "heads": int(heads), **printed(done)}


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_all_ranks(report: dict[str, Any], name: str, tier: str):
    check_hit(report[name][tier], cached(name), report["ranks"])


def test_one_rank_has_the_memory_and_the_files(report: dict[str, Any]):
    share = report["ranks"] // report["heads"]
    for first in range(0, report["ranks"], share):
        group = slice(first, first + share)
        check_one_copy(*report["memory"][group])
        own, *others = report["files"][group]
        assert own > 0
        assert not any(others)


def test_a_chunk_that_the_first_rank_lost_is_no_hit(report: dict[str, Any]):
    check_lost(report["first loses a chunk"], FAULTS["first loses a chunk"])


@pytest.mark.parametrize("name", ["first fails", "second fails", "nothing is lent"])
def test_a_load_that_fails_on_either_rank_is_recomputed_on_all(report: dict[str, Any], name: str):
    check_failed(report[name], FAULTS[name], report["ranks"])


def test_tokens_are_right_while_chunks_come_and_go(report: dict[str, Any]):
    assert report["at once"]["right"] == 30
    assert report["at once"]["hits"] > 10 * CHUNK
