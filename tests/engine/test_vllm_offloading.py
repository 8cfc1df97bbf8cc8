"""The disk tier behind vLLM's own offloading, in a real vLLM on CPU: bytes and tokens compared."""

from __future__ import annotations

import pytest
from packaging.version import Version
from support.offloading_probe import PROMPTS
from support.real_engine import BLOCK, restored
from support.scripts import printed, run_probe

from lmcache_xpu import versions
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),  # two engines, one after the other
    pytest.mark.skipif(
        Version(str(versions.installed().vllm)) < Version("0.30"),
        reason="vLLM's interface of tiers is another before 0.30",
    ),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """What an engine computes, and what the next one finds."""
    directory = tmp_path_factory.mktemp("offloading")
    arguments = (str(make_model(EXACT, directory)), directory / "disk", "ours")
    cold = printed(run_probe("offloading", "fill", *arguments))
    return cold, printed(run_probe("offloading", "restart", *arguments))


@pytest.mark.parametrize("name", PROMPTS)
def test_a_restarted_engine_hits_what_the_last_one_stored(reports: tuple[dict, dict], name: str):
    cold, warm = reports[0][name], reports[1]["after"][name]
    whole = (PROMPTS[name] - 1) // BLOCK
    assert warm["hit"] >= whole * BLOCK
    assert warm["answer"] == cold["answer"]
    assert restored(cold["blocks"], warm["blocks"]) >= whole


def test_damaged_files_are_computed_and_the_engine_goes_on(reports: tuple[dict, dict]):
    cold, damaged = reports[0]["inside"], reports[1]["damaged"]
    assert damaged["files"] >= PROMPTS["inside"] // BLOCK
    assert damaged["hit"] == 0
    assert damaged["answer"] == cold["answer"]
    assert restored(cold["blocks"], damaged["blocks"]) >= PROMPTS["inside"] // BLOCK
