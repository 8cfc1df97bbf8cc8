"""What is read from a vLLM engine's configuration, with vLLM's own specs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_xpu.errors import LayoutError, SettingsError
from lmcache_xpu.model.kv_cache_facts import (
    EngineFacts,
    _only_spec,
    check_chunks,
    engine_facts,
)
from lmcache_xpu.model.model_fingerprint import fingerprint

COMMIT = "c0ffee"
WEIGHTS = f"+w{fingerprint('org/model', COMMIT)}"
FULL = {"block_size": 64, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}


def read(
    *specs,
    device: str = "xpu",
    cache_dtype: str = "auto",
    resolves: bool = True,
    monkeypatch,
    **parallel: int,
) -> EngineFacts:
    import vllm.platforms

    platform = SimpleNamespace(device_type=device)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    resolved = SimpleNamespace(cache_dtype=cache_dtype)
    if resolves:
        resolved.get_resolved_kv_cache_layout = lambda: KVCacheLayout.LBNHC
    model_config = SimpleNamespace(
        model="org/model",
        dtype=torch.bfloat16,
        hf_config=SimpleNamespace(_commit_hash=COMMIT),
    )
    sizes = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    sizes.setdefault("world_size", sizes["tensor_parallel_size"])
    vllm_config = SimpleNamespace(
        cache_config=resolved,
        model_config=model_config,
        parallel_config=SimpleNamespace(**sizes),
        speculative_config=None,
    )
    return engine_facts(vllm_config, KVCacheConfig(8, [], groups))


def test_a_dense_cache_is_what_lmcache_s_key_says(monkeypatch):
    facts = read(FullAttentionSpec(**FULL), monkeypatch=monkeypatch)
    assert facts == EngineFacts(
        device_type="xpu",
        kv_layout="LBNHC",
        opaque_blocks=False,
        heads=8,
        head_size=128,
        block_size=64,
        namespace=WEIGHTS,
    )


def test_the_fingerprint_of_weights_is_the_same_on_all_ranks(monkeypatch):
    spaces = {
        read(
            FullAttentionSpec(**{**FULL, "num_kv_heads": 8 // size}),
            tensor_parallel_size=size,
            monkeypatch=monkeypatch,
        ).namespace
        for size in (1, 2, 4)
    }
    assert len(spaces) == 1


def test_an_older_vllm_is_asked_with_its_configuration_set(monkeypatch):
    """As vLLM 0.26: a scheduler whose workers have processes of their own has none."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends import utils

    def layout() -> str:
        assert get_current_vllm_config().model_config.model == "org/model"
        return "HND"

    monkeypatch.setattr(utils, "get_kv_cache_layout", layout, raising=False)
    facts = read(FullAttentionSpec(**FULL), resolves=False, monkeypatch=monkeypatch)
    assert facts.kv_layout == "HND"
    with pytest.raises(AssertionError, match="vLLM config"):
        get_current_vllm_config()


def test_the_content_counts_not_the_model_s_head(monkeypatch):
    fp8 = {**FULL, "dtype": torch.uint8}
    scaled = FullAttentionSpec(**fp8, state_content_bytes=2 * 128 + 8)
    facts = read(scaled, cache_dtype="fp8_e4m3", monkeypatch=monkeypatch)
    assert (facts.head_size, facts.namespace) == (132, f"{WEIGHTS}.fp8_e4m3.c264")
    unequal = FullAttentionSpec(**FULL, head_size_v=64)
    assert read(unequal, monkeypatch=monkeypatch).head_size == 96
    odd = FullAttentionSpec(**fp8, state_content_bytes=257)
    with pytest.raises(LayoutError, match="257 bytes"):
        read(odd, monkeypatch=monkeypatch)


def test_fp8_formats_do_not_share_a_cache(monkeypatch):
    """Both are bytes to LMCache; their values differ."""
    spec = FullAttentionSpec(**{**FULL, "dtype": torch.uint8})
    spaces = {
        read(spec, cache_dtype=name, monkeypatch=monkeypatch).namespace
        for name in ("fp8_e4m3", "fp8_e5m2", "auto")
    }
    assert len(spaces) == 3


def test_mla_is_one_plane_and_row_major_everywhere(monkeypatch):
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    facts = read(latent, device="cpu", mla=True, monkeypatch=monkeypatch)
    assert (facts.heads, facts.head_size, facts.opaque_blocks) == (1, 576, False)
    assert facts.namespace == WEIGHTS


def test_cpu_blocks_are_opaque_and_named_by_their_packing(monkeypatch):
    import vllm.v1.attention.backends.cpu_attn as cpu_attn

    for isa in ("amx", "vec"):
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, isa=isa: isa)
        facts = read(FullAttentionSpec(**FULL), device="cpu", monkeypatch=monkeypatch)
        assert facts.opaque_blocks
        assert facts.namespace == f"{WEIGHTS}.cpu.{isa}.LBNHC.b64.bfloat16.vllm0.32.0"
        check_chunks(facts, chunk_size=256, save_unfull_chunk=False)
        with pytest.raises(SettingsError, match="chunk_size 96 with blocks of 64"):
            check_chunks(facts, chunk_size=96, save_unfull_chunk=False)
        with pytest.raises(SettingsError, match="save_unfull_chunk"):
            check_chunks(facts, chunk_size=256, save_unfull_chunk=True)
    facts = read(FullAttentionSpec(**FULL), monkeypatch=monkeypatch)
    check_chunks(facts, chunk_size=96, save_unfull_chunk=True)  # tokens are rows elsewhere


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(**FULL, sliding_window=1024),
        ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=1024),
        MambaSpec(block_size=64, shapes=((8, 8),), dtypes=(torch.bfloat16,)),
    ],
    ids=["sliding window", "chunked local", "mamba"],
)
def test_groups_without_a_restorable_prefix_are_refused(spec, monkeypatch):
    for specs in ((spec,), (FullAttentionSpec(**FULL), spec)):
        with pytest.raises(LayoutError, match=f"{type(spec).__name__}, which does not keep all"):
            read(*specs, monkeypatch=monkeypatch)


def test_hybrid_shapes_are_refused(monkeypatch):
    other = FullAttentionSpec(**{**FULL, "num_kv_heads": 4})
    with pytest.raises(LayoutError, match="2 KV cache groups with 2 shapes"):
        read(FullAttentionSpec(**FULL), other, monkeypatch=monkeypatch)


def promoted(full: dict, window: dict) -> KVCacheConfig:
    """What vLLM makes of windows for a connector like ours, by its own function."""
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

    specs = {f"layer.{i}": SlidingWindowSpec(**window, sliding_window=1024) for i in range(5)}
    specs["layer.5"] = FullAttentionSpec(**full)
    unify_hybrid_kv_cache_specs(specs)
    return KVCacheConfig(
        8, [], [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))]
    )


def test_windows_that_are_kept_whole_are_served():
    _only_spec(promoted(FULL, FULL))


def test_layers_with_heads_of_two_sizes_are_refused():
    """As Gemma 4's, which vLLM promotes as well."""
    with pytest.raises(LayoutError, match=r"2 shapes.*Models whose layers differ"):
        _only_spec(promoted({**FULL, "head_size": 512}, {**FULL, "head_size": 256}))
