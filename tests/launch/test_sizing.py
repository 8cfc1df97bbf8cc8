"""Bytes of a token and of a history, against figures that are known from elsewhere."""

from __future__ import annotations

import pytest
from support.model_configs import DEEPSEEK_V3, LLAMA_3_8B, write
from typer.testing import CliRunner

from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import model_support
from lmcache_xpu.launch.sizing import KVShape

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "transformers")
]

LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "torch_dtype": "float16",
}
QWEN_3_8B = {  # heads that are wider than hidden_size / heads, and a window that is switched off
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
LLAVA = {  # a language model inside
    "model_type": "llava",
    "text_config": LLAMA_3_8B,
    "vision_config": {"model_type": "clip_vision_model"},
}


FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}
LLM_COMPRESSOR = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_KV}
MODELOPT = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("config", "options", "kind", "expected"),
    [
        (LLAMA_3_8B, {}, "GQA", 131072),
        (LLAMA_3_8B, {"kv_dtype": "fp8"}, "GQA", 65536),
        (LLAMA_3_8B, {"kv_dtype": "fp8_e4m3"}, "GQA", 65536),
        (LLAMA_3_8B, {"tier_dtype": "fp8"}, "GQA", 65536),
        (LLAMA_3_8B, {"tensor_parallel": 4}, "GQA", 32768),
        (LLAMA_3_8B, {"tensor_parallel": 16}, "GQA", 16384),  # one of eight heads, twice
        (LLAMA_3_8B, {"pipeline_parallel": 2}, "GQA", 65536),
        (LLAMA_3_8B, {"pipeline_parallel": 3}, "GQA", 11 * 4096),  # of 32 layers, 11 in a group
        (LLAMA_2_7B, {}, "MHA", 524288),
        (QWEN_3_8B, {}, "GQA", 147456),
        ({**LLAMA_3_8B, "quantization_config": LLM_COMPRESSOR}, {}, "GQA", 65536),
        ({**LLAMA_3_8B, "quantization_config": MODELOPT}, {}, "GQA", 65536),
        ({**LLAMA_3_8B, "quantization_config": {"quant_method": "awq"}}, {}, "GQA", 131072),
        ({**LLAMA_3_8B, "quantization_config": MODELOPT}, {"kv_dtype": "float16"}, "GQA", 131072),
        ({**LLAMA_3_8B, "quantization_config": MODELOPT}, {"dtype": "bfloat16"}, "GQA", 65536),
        (LLAMA_3_8B, {"dtype": "float32"}, "GQA", 262144),
        (DEEPSEEK_V3, {}, "MLA", 61 * 576 * 2),
        (DEEPSEEK_V3, {"tensor_parallel": 8}, "MLA", 61 * 576 * 2),
        (LLAVA, {}, "GQA", 131072),
        ({**LLAMA_3_8B, "torch_dtype": "float32"}, {}, "GQA", 131072),  # served as float16
        ({**LLAMA_3_8B, "torch_dtype": "float32"}, {"kv_dtype": "float32"}, "GQA", 262144),
    ],
)
def test_bytes_per_token(tmp_path, config, options, kind, expected):
    shape = KVShape.of_model(write(tmp_path, config), **options)
    assert (shape.kind, shape.token_bytes) == (kind, expected)


def test_a_file_is_as_good_as_its_directory(tmp_path):
    directory = write(tmp_path, LLAMA_3_8B)
    assert KVShape.of_model(f"{directory}/config.json") == KVShape.of_model(directory)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba2"},
        {"model_type": "bamba"},
        {"model_type": "deepseek_v32"},
    ],
)
def test_models_that_are_not_offloaded_are_refused(tmp_path, config):
    with pytest.raises(SettingsError, match="--no-offload"):
        KVShape.of_model(write(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "gpt_oss"}, 36),
        ({"model_type": "gemma3_text", "num_hidden_layers": 62}, 62),
        ({"model_type": "llama4_text", "num_hidden_layers": 48}, 48),
        ({"model_type": "mistral", "sliding_window": 4096}, 32),
    ],
)
def test_tiers_hold_the_whole_of_a_short_prompt_also_of_layers_with_windows(
    tmp_path, config, layers
):
    shape = KVShape.of_model(write(tmp_path, config))
    assert shape.layers == layers
    assert shape.history_bytes(2048, 256) == 2048 * shape.token_bytes


ONCE = "each {} devices hold the same, and one of them stores it for all"
EACH = "each {} devices hold the same, and each stores a copy of its own"


@pytest.mark.parametrize(
    ("config", "devices", "notes"),
    [
        (DEEPSEEK_V3, (1, 1), ()),
        (DEEPSEEK_V3, (4, 1), (ONCE.format(4),)),
        (LLAMA_3_8B, (16, 1), (EACH.format(2),)),  # of 8 KV heads
        (LLAMA_3_8B, (4, 1), ()),
        (LLAMA_3_8B, (16, 2), (EACH.format(2),)),
        (DEEPSEEK_V3, (2, 2), (ONCE.format(2),)),
    ],
)
def test_what_devices_hold_alike_is_said(tmp_path, config, devices, notes):
    tensor, pipeline = devices
    shape = KVShape.of_model(
        write(tmp_path, config), tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    assert shape.notes == notes


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "JSONDecodeError"), ("{}", "model_type"), ('{"model_type": "no-such"}', "no-such")],
)
def test_what_is_no_configuration_is_said(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=said):
        KVShape.of_model(str(tmp_path))


def test_an_unknown_type_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="kv_dtype=int3"):
        KVShape.of_model(write(tmp_path, LLAMA_3_8B), kv_dtype="int3")


QWEN_3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "config",
    [LLAMA_3_8B, LLAMA_2_7B, LLAVA, QWEN_3_8B, DEEPSEEK_V3, QWEN_3_NEXT],
    ids=lambda config: config["model_type"],
)
def test_a_file_that_is_read_as_it_is_counts_as_with_transformers(tmp_path, config, monkeypatch):
    model = write(tmp_path, config)
    with monkeypatch.context() as patch:
        patch.setattr(model_support, "read_config", lambda _: pytest.fail("transformers was asked"))
        alone = KVShape.of_model(model)
    monkeypatch.setattr(model_support, "_FAMILIES", {})
    assert KVShape.of_model(model) == alone


QWEN_3_6_27B = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "torch_dtype": "bfloat16",
}


def test_states_count_once_a_step_and_not_per_token(tmp_path):
    """16 of 64 layers have keys and values; 48 keep 48 x 128 x 128 floats and 3 inputs."""
    model = write(tmp_path, QWEN_3_6_27B)
    shape = KVShape.of_model(model)
    state = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)
    assert (shape.layers, shape.token_bytes, shape.state_bytes) == (16, 16 * 2 * 4 * 256 * 2, state)
    assert shape.history_bytes(1024, 512) == 1024 * shape.token_bytes + 2 * state
    # A state ends a chunk that is longer than a step.
    assert shape.history_bytes(8192, 4096) == 8192 * shape.token_bytes + 3 * state
    halved = KVShape.of_model(model, tensor_parallel=2)
    assert (halved.token_bytes, halved.state_bytes) == (shape.token_bytes // 2, state // 2)
    command = ["size", model, "--context", "20480"]
    said = " ".join(CliRunner().invoke(app, command, catch_exceptions=False).output.split())
    assert "once for each 2,048 tokens" in said
    assert f"{(20480 * shape.token_bytes + 11 * state) / 2**30:.2f} GiB per user" in said


def test_windows_count_whole_in_a_short_history_and_in_few_places_of_a_long_one(tmp_path):
    """20 of 24 layers of the usual Gemma 3 of this size attend to 1,024 tokens."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    config = {"model_type": "gemma3_text", "num_hidden_layers": 24, "layer_types": layers}
    model = write(tmp_path, {**config, "sliding_window": 1024})
    shape = KVShape.of_model(model)
    assert (shape.layers, shape.window_layers, shape.window) == (24, 20, 1024)
    assert shape.history_bytes(8192, 256) == 8192 * shape.token_bytes
    kept = 8192 + 8 * 1024
    expected = shape.token_bytes * (4 * 61_440 + 20 * kept) // 24
    assert shape.history_bytes(61_440, 256) == pytest.approx(expected, abs=1)
    said = CliRunner().invoke(app, ["size", model, "--context", "61440"]).output
    assert "20 layers attend to a window" in " ".join(said.split())


def test_heads_of_several_sizes_are_counted_each(tmp_path):
    """5 of 30 layers of the usual Gemma 4 have heads of 512 elements, the others of 256."""
    shape = KVShape.of_model(write(tmp_path, {"model_type": "gemma4_text"}))
    assert shape.token_bytes == pytest.approx(2 * 4 * (25 * 256 + 5 * 512) * 2, rel=0.01)
