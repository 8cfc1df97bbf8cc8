"""`lmcache-xpu size` against figures that are known from elsewhere."""

from __future__ import annotations

import json

import pytest
from support.model_configs import LLAMA_3_8B
from typer.testing import CliRunner

from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import model_support
from lmcache_xpu.launch.model_support import weights_bytes
from lmcache_xpu.launch.sizing import KVShape, agent_compute, fit

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
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
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


def write(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


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


def test_a_tier_holds_whole_histories_of_whole_chunks(tmp_path):
    shape = KVShape.of_model(write(tmp_path, LLAMA_3_8B))
    fitted = fit(
        shape,
        context_tokens=10_000,  # 39 chunks of 256, 32 MiB each, and 16 tokens
        users=5,
        chunk_tokens=256,
        tiers_gib={"engine": None, "CPU": 5, "disk": 39 / 32 * 5},
    )
    assert (fitted.history_tokens, fitted.history_bytes) == (39 * 256, 39 * 2**25)
    assert fitted.needed_gib == 5 * 39 / 32
    assert {n: (t.histories, t.enough) for n, t in fitted.tiers.items()} == {
        "CPU": (4, False),
        "disk": (5, True),
    }


def test_an_fp8_tier_holds_twice_what_the_engines_own_cache_holds(tmp_path):
    command = ["size", write(tmp_path, LLAMA_3_8B), "--kv-cache-gib", "4", "--cpu-gib", "4"]
    fp8 = [*command, "--tier-dtype", "fp8"]
    done = CliRunner().invoke(app, [*fp8, "--json"], catch_exceptions=False)
    tiers = json.loads(done.stdout)["tiers"]
    assert {name: tier["histories"] for name, tier in tiers.items()} == {"engine": 4, "CPU": 8}
    assert "bfloat16 (fp8 in the tiers)" in CliRunner().invoke(app, fp8).stdout


def test_less_than_a_chunk_is_never_stored(tmp_path):
    shape = KVShape.of_model(write(tmp_path, LLAMA_3_8B))
    with pytest.raises(SettingsError, match="one whole chunk"):
        fit(shape, context_tokens=255, users=1, chunk_tokens=256, tiers_gib={})


def test_the_command_reads_the_variables_of_serve(tmp_path):
    result = CliRunner().invoke(
        app,
        ["size", write(tmp_path, LLAMA_3_8B), "--context", "8192", "--users", "9", "--json"],
        env={"LMCACHE_XPU_CPU_GIB": "8", "LMCACHE_XPU_DISK_GIB": "16"},
        catch_exceptions=False,
    )
    fitted = json.loads(result.stdout)
    assert fitted["token_bytes"] == 131072
    assert fitted["tiers"]["CPU"] == {
        "gib": 8,
        "tokens": 65536,
        "histories": 8,
        "enough": False,
        "compute": None,
    }
    assert fitted["tiers"]["disk"]["enough"] is True


def test_a_disk_tier_of_0_gib_is_none(tmp_path):
    command = ["size", write(tmp_path, LLAMA_3_8B), "--json", "--disk-gib", "0"]
    fitted = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert set(fitted["tiers"]) == set(fitted["machine_gib"]) == {"CPU"}


def test_the_command_for_people(tmp_path):
    directory = write(tmp_path, DEEPSEEK_V3)
    result = CliRunner().invoke(app, ["size", directory], catch_exceptions=False)
    assert "MLA, 61 layers x 576 x bfloat16: 70,272 bytes per token" in result.stdout


def test_the_machine_holds_the_tiers_of_every_device(tmp_path):
    """In the numbers of `serve`, doctor and chart."""
    sizes = ["--cpu-gib", "64", "--disk-gib", "500", "--kv-cache-gib", "8"]
    devices = ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--data-parallel", "2"]
    command = ["size", write(tmp_path, LLAMA_3_8B), *sizes, *devices]
    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["machine_gib"] == {"CPU": 512, "disk": 4000}
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "of the machine, for 8 devices: CPU 512 GiB, disk 4000 GiB" in result.stdout
    single = CliRunner().invoke(app, command[:6], catch_exceptions=False)
    assert "of the machine, for 1 device: CPU 64 GiB" in single.stdout


def size(*arguments):
    return CliRunner().invoke(app, ["size", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("tokens_per_agent", "compute"),
    [(250_000, 1.15), (249_999, 1.55), (125_000, 1.55), (75_000, 3.3), (25_000, 13.4), (1, None)],
)
def test_what_agents_compute_depends_on_the_tokens_for_each(tokens_per_agent, compute):
    assert agent_compute(tokens_per_agent) == compute


def test_agents_count_250_000_tokens_each(tmp_path):
    """Of 128 KiB a token: 30.5 GiB for each, in whole chunks."""
    model = write(tmp_path, LLAMA_3_8B)
    fitted = json.loads(size(model, "--agents", 2, "--cpu-gib", 61, "--json").stdout)
    assert fitted["history_tokens"] == 250_000 // 256 * 256
    assert fitted["tiers"]["CPU"]["enough"] is True
    said = size(model, "--agents", 8, "--cpu-gib", 61).stdout
    assert "30.50 GiB per agent, 244.00 GiB for 8 agents" in said
    assert "up to 13.4" in said
    refused = size(model, "--agents", 8, "--users", 2)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_a_gpu_fits_the_weights_or_not_and_what_is_left_is_the_engines(tmp_path):
    model = write(tmp_path, LLAMA_3_8B)
    assert "weights are not at hand" in size(model, "--gpu-gib", 24).stdout
    index = {"metadata": {"total_size": 15 * 2**30}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fitted = json.loads(size(model, "--gpu-gib", 24, "--json").stdout)
    assert fitted["fits_gpu"] is True
    assert fitted["tiers"]["engine"]["gib"] == pytest.approx(24 * 0.9 - 15)
    assert "Does not fit" in size(model, "--gpu-gib", 16).stdout
    assert "Fits: weights of 7.5 GiB" in size(model, "--gpu-gib", 16, "--tensor-parallel", 2).stdout


def test_weights_are_the_sum_of_their_files_once(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"0" * 100)
    assert weights_bytes(str(tmp_path)) == 200


def test_the_server_keeps_windows_whole(tmp_path):
    layers = ["sliding_attention", "full_attention"] * 12
    model = write(tmp_path, {"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "layer_types": layers, "sliding_window": 128})  # fmt: skip
    history = {
        cache: json.loads(size(model, "--context", 61440, "--cache", cache, "--json").stdout)
        for cache in ("in-process", "server")
    }
    assert history["server"]["history_bytes"] == 61440 * 49152
    assert history["in-process"]["history_bytes"] < history["server"]["history_bytes"]


def test_an_encoder_and_decoder_is_refused(tmp_path):
    done = size(write(tmp_path, {"model_type": "t5", "is_encoder_decoder": True}))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "an encoder and a decoder" in done.stderr


@pytest.mark.parametrize("kind", ["gemma2", "llama"])  # the second is read as it is
def test_what_transformers_itself_refuses_is_one_line(tmp_path, kind):
    wide = LLAMA_3_8B | {"model_type": kind, "hidden_size": "wide"}
    done = size(write(tmp_path, wide))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "hidden_size" in done.stderr


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
