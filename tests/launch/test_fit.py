"""How many histories tiers hold, and what `lmcache-xpu size` says of it."""

from __future__ import annotations

import json

import pytest
from support.model_configs import DEEPSEEK_V3, LLAMA_3_8B, write
from typer.testing import CliRunner

from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.model_support import weights_bytes
from lmcache_xpu.launch.sizing import KVShape, fit

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "transformers")
]


def size(*arguments):
    return CliRunner().invoke(app, ["size", *map(str, arguments)], catch_exceptions=False)


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


@pytest.mark.parametrize(
    ("tokens_per_agent", "compute"),
    [(250_000, 1.15), (249_999, 1.55), (125_000, 1.55), (75_000, 3.3), (25_000, 13.4), (1, None)],
)
def test_what_agents_compute_depends_on_the_tokens_for_each(tmp_path, tokens_per_agent, compute):
    shape = KVShape.of_model(write(tmp_path, LLAMA_3_8B))
    room = {"CPU": 2 * tokens_per_agent * shape.token_bytes / 2**30}
    fitted = fit(shape, context_tokens=1, users=2, chunk_tokens=1, tiers_gib=room, agents=True)
    assert fitted.tiers["CPU"].compute == compute


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
