"""A hit in an engine on CPU: an fp8 tier changes logprobs a little, an exact one nothing."""

from __future__ import annotations

import pytest
from support.real_engine import CHUNK
from support.scripts import printed, run_probe

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("tier_dtype", ["auto", "fp8"])
def test_logprobs_of_a_hit(tier_dtype, model):
    report = printed(run_probe("fp8", model, tier_dtype, "float32", 4))
    assert report["hits"] == [4 * CHUNK]
    mean = report["mean"]
    if tier_dtype == "auto":
        assert (mean["top"], mean["same"]) == (0, 24)
    else:
        assert 0 < mean["top"] < 1
        assert 0 < mean["divergence"] < 0.5
