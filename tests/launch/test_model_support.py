"""Which models are refused, in the same words everywhere and before vLLM starts."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from lmcache_xpu import versions
from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import serve
from lmcache_xpu.launch.model_support import (
    check_layers,
    check_offload,
    check_reachable,
    with_layers,
)
from lmcache_xpu.launch.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "transformers")
]

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
# transformers' names, with the defaults of their configurations.
SERVED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "glm4", "glm4_moe", "smollm3"),
    *("deepseek_v2", "deepseek_v3", "qwen2_5_vl", "qwen3_vl", "mistral"),
)
# Windows beside whole attention.
WINDOWS = ("gpt_oss", "gemma2", "gemma3_text", "llama4_text", "olmo3")
# States, or heads of several sizes.
GROUPS = (
    *("qwen3_next", "qwen3_5", "jamba", "nemotron_h", "kimi_linear", "minimax", "falcon_h1"),
    "gemma4_text",
)
# States in all layers (by their usual configuration), or an index.
REFUSED = {
    "mamba2": "layers of linear_attention",
    "bamba": "layers of linear_attention",
    "granitemoehybrid": "layers of linear_attention",
    "deepseek_v32": "layers of indexed_attention",
}
NOT_BY_LAYER = {
    **dict.fromkeys(GROUPS, "layers of linear_attention"),
    "falcon_h1": "layers of hybrid",
    "mistral": "layers of attention to a window",
    "gemma4_text": "heads of several sizes",
}


def config(kind: str):
    return AutoConfig.for_model(kind).get_text_config()


def saved(kind: str, path, **settings) -> Settings:
    config(kind).save_pretrained(path)
    return Settings.load({"model": str(path), **settings})


@pytest.mark.parametrize("kind", [*SERVED, *WINDOWS, *GROUPS])
def test_what_has_attention_is_served(kind):
    check_offload(config(kind))


@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
@pytest.mark.parametrize("layerwise", [False, True])
def test_others_are_refused_with_the_cause(kind, why, layerwise):
    with pytest.raises(SettingsError, match=re.escape(why)) as refusal:
        check_offload(config(kind), layerwise=layerwise)
    assert "--no-offload" in refusal.value.fix


@pytest.mark.parametrize(("kind", "why"), NOT_BY_LAYER.items())
def test_layer_by_layer_all_layers_have_to_be_alike(kind, why):
    with pytest.raises(SettingsError, match=re.escape(why)) as refusal:
        check_offload(config(kind), layerwise=True)
    assert "Leave layerwise off" in refusal.value.fix


@pytest.mark.parametrize("kind", WINDOWS)
def test_layer_by_layer_windows_are_served_beside_whole_attention(kind):
    kinds = check_offload(config(kind), layerwise=True)
    assert kinds.window
    assert kinds.whole


@pytest.mark.parametrize("cache", ["auto", "in-process", "server"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_oss", "gemma4_text"])
def test_the_model_does_not_change_where_lmcache_runs(kind, cache, tmp_path):
    settings = saved(kind, tmp_path, cache=cache)
    kinds = check_layers(settings)
    assert kinds is not None
    assert with_layers(settings, kinds) == settings


@pytest.mark.parametrize(("options", "chunk"), [([], 1), (["--chunk-tokens", "544"], 544)])
@pytest.mark.parametrize("cache", ["auto", "server"])
def test_a_model_with_states_has_chunks_of_one_block_unless_told(
    options, chunk, cache, tmp_path, monkeypatch
):
    config("qwen3_5").save_pretrained(tmp_path)
    monkeypatch.setattr(serve, "built_for", lambda: "xpu")
    command = ["serve", str(tmp_path), "--dry-run", "--cache", cache, *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    said = f"--chunk-size {chunk} " if cache == "server" else f'"chunk_tokens": {chunk},'
    assert said in done.output


def test_the_chunks_of_a_server_that_runs_are_its_own(tmp_path):
    settings = saved("qwen3_5", tmp_path, cache="server", server_url="ipc:///run/kv/server.sock")
    kinds = check_layers(settings)
    assert kinds is not None
    assert with_layers(settings, kinds) == settings


def test_the_page_on_models_names_them_all():
    """In its tables: by transformers' name, which a model's config.json has."""
    text = PAGE.read_text()
    windows, states = (
        "Some layers have a window",
        "Some layers keep a state, or heads of another size",
    )
    parts = re.split(f"^##+ (?:Served|{windows}|{states}|Refused)$", text, flags=re.M)
    assert len(parts) == 5
    for part, kinds in zip(parts[1:], (SERVED, WINDOWS, GROUPS, REFUSED), strict=True):
        assert [kind for kind in kinds if f"`{kind}`" not in part] == []


def test_the_page_names_the_versions_that_are_accepted():
    text = PAGE.read_text()
    for name, accepted in (
        ("vLLM", versions.TESTED["vllm"]),
        ("LMCache", versions.TESTED["lmcache"]),
    ):
        assert f"| {name} | {', '.join(accepted)} |" in text


@pytest.mark.parametrize("kind", ["mamba2", "deepseek_v32"])
def test_all_commands_refuse_in_the_same_words_before_vllm_starts(
    kind, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    model = tmp_path / "model"
    config(kind).save_pretrained(model)
    with pytest.raises(SettingsError) as refusal:
        check_offload(config(kind))
    said = {}
    for command in (["size"], ["serve", "--dry-run"], ["serve"], ["doctor", "--model"]):
        done = CliRunner().invoke(app, [*command, str(model)], catch_exceptions=False)
        said[" ".join(command)] = " ".join((done.output + capfd.readouterr().out).split())
        assert done.exit_code == (1 if command[0] == "doctor" else 2), done.output
    for words in (refusal.value.found, refusal.value.fix):
        assert [command for command, text in said.items() if words not in text] == []
    plain = CliRunner().invoke(app, ["serve", str(model), "--dry-run", "--no-offload"])
    assert plain.exit_code == 0


@pytest.mark.parametrize("command", [["serve", "--dry-run"], ["serve"], ["doctor", "--model"]])
def test_layerwise_is_refused_before_vllm_starts(command, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    monkeypatch.setenv("LMCACHE_XPU_LAYERWISE", "true")
    config("gemma4_text").save_pretrained(tmp_path)
    done = CliRunner().invoke(app, [*command, str(tmp_path)], catch_exceptions=False)
    assert done.exit_code, done.output
    said = " ".join((done.output + capfd.readouterr().out).split())
    assert "heads of several sizes" in said
    assert "Leave layerwise off" in said


@pytest.mark.parametrize("command", [["size"], ["serve", "--dry-run"], ["doctor", "--model"]])
def test_states_are_not_rounded(command, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("LMCACHE_XPU_TIER_DTYPE", "fp8")
    config("qwen3_5").save_pretrained(tmp_path)
    done = CliRunner().invoke(app, [*command, str(tmp_path)], catch_exceptions=False)
    assert done.exit_code, done.output
    said = " ".join((done.output + capfd.readouterr().out).split())
    assert "tier_dtype=fp8 for a qwen3_5" in said
    assert "Leave tier_dtype unset" in said


def test_a_configuration_that_nobody_can_judge_is_left_to_the_engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Point huggingface_hub at an address, with nothing downloaded."""
    from huggingface_hub import constants

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "VLLM_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def at(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)

    return at


def test_a_hub_that_does_not_answer_costs_seconds(hub, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and nobody listens
        hub(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(SettingsError, match=r"no answer from http://127.* and model=org/m was"):
            check_reachable("org/m")
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
        check_reachable("org/m")  # the proxy knows the way


def test_a_hub_that_answers_is_left_to_vllm(hub):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub(f"http://127.0.0.1:{server.getsockname()[1]}")
        check_reachable("org/m")


def test_what_is_here_needs_no_hub(hub, tmp_path):
    hub("http://127.0.0.1:9")
    for model in (str(tmp_path), "/no/such", "./relative", "s3://bucket/model"):
        check_reachable(model)


def test_a_hub_that_must_not_be_asked_is_said(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match="HF_HUB_OFFLINE"):
        check_reachable("org/m")


@pytest.mark.parametrize(
    "options",
    [
        ["--chunk-tokens", "0"],
        ["--cpu-gib=-3"],
        ["--disk-gib=-1"],
        ["--tensor-parallel", "0"],
        ["--tensor-parallel", "3"],
        ["--users", "0"],
        ["--kv-dtype", "int3"],
    ],
)
def test_sizes_that_can_not_be_are_refused_without_a_traceback(tmp_path, options):
    config("llama").save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["size", str(tmp_path), *options])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


def test_size_counts_in_the_type_that_serve_would_use(tmp_path, monkeypatch):
    config("llama").save_pretrained(tmp_path)
    monkeypatch.setenv("LMCACHE_XPU_DTYPE", "float32")
    done = CliRunner().invoke(app, ["size", str(tmp_path)], catch_exceptions=False)
    assert "x float32" in done.output


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_served_where_nothing_is_offloaded(kind, tmp_path):
    with pytest.raises(SettingsError, match="--no-offload"):
        check_layers(saved(kind, tmp_path))
    assert check_layers(saved(kind, tmp_path, offload=False)) is None


def test_a_model_that_is_not_here_is_left_to_the_engine():
    assert check_layers(Settings.load({"model": "nobody/nothing"})) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{bad", "JSONDecodeError"),
        ('{"model_type": "llama", "hidden_size": "many"}', "'hidden_size' expected int"),
        ('{"model_type": "t5", "is_encoder_decoder": true}', "an encoder and a decoder"),
    ],
)
def test_a_wrong_config_is_one_line_before_vllm_starts(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError) as refused:
        check_layers(Settings.load({"model": str(tmp_path)}))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert check_layers(Settings.load({"model": str(tmp_path), "offload": False})) is None


def test_a_kind_that_transformers_does_not_know_is_said_in_a_short_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "brand_new"}')
    done = CliRunner().invoke(app, ["size", str(tmp_path)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "Unrecognized model identifier: brand_new" in done.stderr
    assert len(done.stderr) < 600
