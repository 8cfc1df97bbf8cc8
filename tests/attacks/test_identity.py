"""What a user sets, or exchanges, between a store and a hit: none of it may bring wrong KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_xpu.cache_engine.model_settings import settings_mark
from lmcache_xpu.errors import SettingsError


@dataclass
class Model:
    hf_overrides: Any = field(default_factory=dict)
    hf_config_path: str | None = None
    quantization: str | None = None
    disable_sliding_window: bool = False
    model_impl: str = "auto"
    max_model_len: int = 4096
    seed: int = 0
    served_model_name: str | None = None
    hf_config: Any = field(default_factory=SimpleNamespace)
    hf_text_config: Any = field(default_factory=SimpleNamespace)
    multimodal_config: Any = None


@dataclass
class Cache:
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    calculate_kv_scales: bool = False


def mark(cache: Cache | None = None, load_format: str = "auto", **model: Any) -> str:
    config = SimpleNamespace(
        model_config=Model(**model),
        cache_config=cache or Cache(),
        load_config=SimpleNamespace(load_format=load_format),
    )
    return settings_mark(config)


def test_a_model_as_its_files_say_has_the_name_that_earlier_entries_have():
    assert mark() == ""
    assert mark(max_model_len=100, seed=7, served_model_name="m") == ""
    fp8 = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert mark(hf_config=fp8, quantization="fp8") == ""
    assert mark(quantization="gguf") == ""
    assert mark(load_format="safetensors") == ""


YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}


@pytest.mark.parametrize(
    "model",
    [
        {"hf_overrides": YARN},
        {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"hf_overrides": {"sliding_window": 512}},
        {"hf_overrides": {"final_logit_softcapping": None}},
        {"hf_overrides": mark},
        {"quantization": "fp8"},
        {"quantization": "sym_int4"},
        {"hf_config_path": "/other"},
        {"disable_sliding_window": True},
        {"model_impl": "transformers"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"cache": Cache(kv_cache_dtype_skip_layers=["0"])},
    ],
    ids=str,
)
def test_what_is_set_beside_the_files_is_in_the_name(model):
    name = mark(**model)
    assert name == mark(**model) != ""
    others = [mark(hf_overrides=YARN | {"a": 1}), mark(quantization="awq"), mark()]
    assert name not in others


def test_the_order_of_what_is_set_is_not_in_the_name():
    assert mark(hf_overrides={"a": 1, "b": 2}) == mark(hf_overrides={"b": 2, "a": 1})


def test_scales_that_each_engine_computes_anew_are_refused():
    with pytest.raises(SettingsError, match="--calculate-kv-scales"):
        mark(Cache(calculate_kv_scales=True))
