"""What the connector's class answers before there is a connector."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.model.kv_cache_facts import check_model
from lmcache_xpu.stock.connector import LMCacheXPUConnector


def config_of(method: str | None = None, *, hybrid: bool = False) -> SimpleNamespace:
    text = SimpleNamespace(model_type="qwen3_next", layer_types=["linear_attention"])
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid, hf_text_config=text),
        speculative_config=None if method is None else SimpleNamespace(method=method),
    )


@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_vllm_hears_why_a_model_is_not_served_before_it_fails_on_its_layers(device, monkeypatch):
    import vllm.platforms

    platform = SimpleNamespace(device_type=device)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    ask = LMCacheXPUConnector.get_required_kvcache_layout
    assert ask(config_of()) is None
    if device == "cuda":  # LMCache's own connector, as it is
        assert ask(config_of(hybrid=True)) is None
        return
    with pytest.raises(SettingsError, match=r"linear_attention in a qwen3_next.*--no-offload"):
        ask(config_of(hybrid=True))


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "eagle3", "mtp"])
def test_drafters_like_the_model_or_without_a_cache_are_served(method):
    check_model(config_of(method))


@pytest.mark.parametrize("method", ["draft_model", "dflash", "extract_hidden_states"])
def test_drafters_with_caches_of_their_own_are_refused(method):
    with pytest.raises(SettingsError, match=f"{method}.*ngram, eagle, eagle3 or mtp"):
        check_model(config_of(method))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_layer_by_layer_a_drafter_with_layers_is_refused(method):
    """LMCache counts vLLM's calls, and takes the last of the model for the last of all."""
    check_model(config_of("ngram"), layerwise=True)
    with pytest.raises(SettingsError, match=f"{method}.*use_layerwise"):
        check_model(config_of(method), layerwise=True)
