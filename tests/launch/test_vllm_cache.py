"""`cache=vllm` refuses what vLLM's own offloading has not."""

from __future__ import annotations

import pytest

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.preflight import TIERS_SINCE, check_vllm
from lmcache_xpu.launch.serve import describe
from lmcache_xpu.launch.settings import Settings


@pytest.mark.parametrize(
    "values",
    [
        {"layerwise": True},
        {"kv_events": "tcp://*:5557"},
        {"remote_url": "redis://host:1"},
        {"tier_dtype": "fp8"},
        {"server_url": "tcp://host:1"},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_what_vllm_lacks_is_refused(values: dict):
    with pytest.raises(SettingsError, match="cache=vllm"):
        Settings.load({"model": "m", "device": "xpu", "cache": "vllm", **values})


def test_an_older_vllm_is_refused():
    with pytest.raises(SettingsError, match=r"vLLM 0\.9 with cache=vllm.*0\.30"):
        check_vllm("0.9")
    check_vllm(str(TIERS_SINCE))


def test_options_that_would_replace_the_connector_are_refused():
    values = {"model": "m", "device": "xpu", "extra_args": ["--kv-offloading-size", "4"]}
    with pytest.raises(SettingsError, match="cache=vllm"):
        Settings.load(values)
    assert not Settings.load({**values, "offload": False}).offload


def test_a_dry_run_shows_no_lmcache():
    settings = Settings.load({"model": "m", "device": "cuda", "cache": "vllm"})
    shown = describe(settings)
    assert "OffloadingConnector" in shown
    assert "# LMCache" not in shown
