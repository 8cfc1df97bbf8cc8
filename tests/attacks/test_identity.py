"""What a user sets, or exchanges, between a store and a hit: none of it may bring wrong KV."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.model import adapter_names
from lmcache_xpu.model.adapter_names import adapter_name
from lmcache_xpu.model.model_fingerprint import fingerprint
from lmcache_xpu.model.model_settings import ENVIRONMENT, NAMED, settings_mark


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
    config_format: str = "auto"
    original_max_model_len: int | None = None
    override_generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cache:
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    use_replayssm: bool = False
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


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
PHI3 = SimpleNamespace(rope_parameters=LONGROPE, original_max_position_embeddings=4096)
LLAMA4 = SimpleNamespace(model_type="llama4")
STATES = SimpleNamespace(mamba_ssm_dtype="bfloat16")


def test_lengths_and_states_that_vllm_takes_by_default_keep_the_name():
    assert mark(hf_config=PHI3, max_model_len=4096) == ""
    assert mark(hf_config=SimpleNamespace(rope_parameters=LONGROPE), max_model_len=2**17) == ""
    assert mark(hf_config=LLAMA4, max_model_len=2**20) == ""
    assert mark(hf_config=LLAMA4, max_model_len=2**14, original_max_model_len=-1) == ""
    assert mark(Cache(mamba_ssm_cache_dtype="bfloat16"), hf_text_config=STATES) == ""
    assert mark(Cache(mamba_ssm_cache_dtype="float32")) == ""


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
        {"cache": Cache(mamba_cache_dtype="float16")},
        {"cache": Cache(mamba_ssm_cache_dtype="float16")},
        {"cache": Cache(use_replayssm=True)},
        {"config_format": "mistral"},
        {"hf_config": PHI3, "max_model_len": 2**17},
        {"hf_config": LLAMA4, "max_model_len": 2**15},
        {
            "hf_config": LLAMA4,
            "max_model_len": 2**20,
            "override_generation_config": {"attn_temperature_tuning": False},
        },
    ],
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


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """An adapter that was there before the engine."""
    place = tmp_path / "adapter"
    write_adapter(place, 1)
    begin_engine(monkeypatch)
    return place


def begin_engine(monkeypatch) -> None:
    time.sleep(0.05)  # longer than a tick of the file system's clock
    monkeypatch.setattr(adapter_names, "_BEGAN_NS", time.time_ns())
    time.sleep(0.05)


def write_adapter(place: Path, seed: int) -> None:
    place.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    save_file({"a": torch.randn(64, 64, generator=generator)}, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text('{"r": 4}')


def test_an_adapter_has_the_name_of_its_content(adapter, tmp_path, monkeypatch):
    name = adapter_name(str(adapter))
    assert name == adapter_name(str(adapter)) == fingerprint(str(adapter))
    write_adapter(tmp_path / "same", 1)
    write_adapter(tmp_path / "other", 2)
    begin_engine(monkeypatch)
    assert adapter_name(str(tmp_path / "same")) == name
    assert adapter_name(str(tmp_path / "other")) not in (name, None)


def overwrite(adapter: Path) -> None:
    write_adapter(adapter, 2)


def roll_back(adapter: Path) -> None:
    """By a program that keeps times, as `cp -p`, rsync and tar do."""
    old = adapter.with_name("old")
    write_adapter(old, 2)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        os.utime(old / name, (1e9, 1e9))
        shutil.copy2(old / name, adapter / name)
    os.utime(adapter, (1e9, 1e9))


def exchange_the_link(adapter: Path) -> None:
    moved = adapter.with_name("moved")
    adapter.rename(moved)
    adapter.symlink_to(moved)


def cut(adapter: Path) -> None:
    os.truncate(adapter / "adapter_model.safetensors", 200)


def dangle(adapter: Path) -> None:
    (adapter / "more.bin").symlink_to("/nowhere")


def take_away(adapter: Path) -> None:
    shutil.rmtree(adapter)


@pytest.mark.parametrize(
    "change", [overwrite, roll_back, exchange_the_link, cut, dangle, take_away]
)
def test_an_adapter_that_changed_since_it_was_loaded_has_no_name(adapter, change):
    """The worker goes on with the weights that it has; to name them by the files would be wrong."""
    assert adapter_name(str(adapter)) is not None
    change(adapter)
    assert adapter_name(str(adapter)) is None


@pytest.mark.parametrize(
    "content", [b"", bytes(200), b"\xff" * 200, b"\x08" + bytes(7) + b"[1,2,3]"]
)
def test_a_file_that_is_no_adapter_has_no_name(tmp_path, monkeypatch, content):
    place = tmp_path / "adapter"
    write_adapter(place, 1)
    (place / "adapter_model.safetensors").write_bytes(content)
    begin_engine(monkeypatch)
    assert adapter_name(str(place)) is None


def test_a_clock_that_was_ahead_when_the_engine_began_names_nothing(adapter, monkeypatch):
    monkeypatch.setattr(adapter_names, "_BEGAN_NS", time.time_ns() + 10**15)
    overwrite(adapter)
    assert adapter_name(str(adapter)) is None  # it was written in this very moment


PAGE = Path(__file__).parents[2] / "docs/reference/what-names-a-chunk.md"
KINDS = {
    "model_config": "ModelConfig",
    "multimodal_config": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "lora_config": "LoRAConfig",
    "load_config": "LoadConfig",
    "attention_config": "AttentionConfig",
    "speculative_config": "SpeculativeConfig",
}
WAYS = ("in the name", "refused", "no effect")


def rows(kind: str) -> list[tuple[str, str]]:
    """The fields that the page's table of a configuration has, each with its way."""
    _, heading, section = PAGE.read_text().partition(f"### {kind}\n")
    assert heading, f"add a section '### {kind}' to {PAGE.name}"
    cells = [line.split("|") for line in section.split("\n#")[0].splitlines()]
    return [
        (name, cell[2].strip())
        for cell in cells
        if len(cell) > 3
        for name in re.findall(r"`(\w+)`", cell[1])
    ]


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_page_has_each_field_once(kind):
    listed = [name for name, _ in rows(kind)]
    assert sorted(listed) == sorted(set(listed))
    assert {way for _, way in rows(kind)} <= set(WAYS)


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_page_has_every_field_of_this_vllm(kind):
    """Fields that only other versions have may be there as well."""
    config = pytest.importorskip("vllm.config")
    if (of_vllm := getattr(config, kind, None)) is None:
        pytest.skip(f"this vLLM has no {kind}")
    new = {field.name for field in fields(of_vllm)} - {name for name, _ in rows(kind)}
    assert not new, (
        f"vLLM has new fields in {kind}: {sorted(new)}. Find out of each whether another value "
        f"changes the bytes of the KV cache. If it does, add it to NAMED in model_settings.py, or "
        f"refuse it there. Then add it to the table '{kind}' in docs/reference/{PAGE.name}."
    )


@pytest.mark.parametrize("name", NAMED)
def test_the_page_says_of_each_named_field_that_it_is_in_the_name(name):
    table = dict(rows(KINDS[name]))
    assert {field: table.get(field) for field in NAMED[name]} == dict.fromkeys(
        NAMED[name], "in the name"
    )


def test_the_page_has_each_variable_that_is_in_the_name():
    assert set(re.findall(r"`(VLLM_\w+)`", PAGE.read_text())) == set(ENVIRONMENT)


def test_every_named_field_is_one_of_this_vllm():
    """Or nothing would be named after an upgrade that moves it."""
    config = pytest.importorskip("vllm.config")
    for name, named in NAMED.items():
        assert set(named) <= {field.name for field in fields(getattr(config, KINDS[name]))}
