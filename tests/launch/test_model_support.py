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
from lmcache_xpu.errors import SettingsError, VersionError
from lmcache_xpu.launch import model_support, serve
from lmcache_xpu.launch.model_support import (
    check_layers,
    check_offload,
    check_reachable,
    with_cache,
)
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.versions import GROUPS_SINCE_VLLM, Versions

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "transformers")
]

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
# transformers' names, with the defaults of their configurations.
SERVED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "glm4", "glm4_moe", "smollm3"),
    *("deepseek_v2", "deepseek_v3", "qwen2_5_vl", "qwen3_vl"),
)
AT_A_PRICE = {"gpt_oss": 2.0, "gemma2": 2.0, "gemma3_text": 6.5, "llama4_text": 4.0, "olmo3": 4.0}
REFUSED = {
    "qwen3_next": "layers of linear_attention",
    "qwen3_5": "layers of linear_attention",
    "mamba2": "layers of linear_attention",
    "jamba": "layers of linear_attention",
    "bamba": "layers of linear_attention",
    "nemotron_h": "layers of linear_attention",
    "granitemoehybrid": "layers of linear_attention",
    "kimi_linear": "layers of linear_attention",
    "minimax": "layers of linear_attention",
    "falcon_h1": "layers of hybrid",
    "mistral": "attention to a window of 4096 tokens alone",
    "gemma4_text": "heads of several sizes",
    "deepseek_v32": "layers of indexed_attention",
}
# Refused by LMCache's server too: states in all layers (by their usual configuration), or an index.
NOWHERE = ("mamba2", "bamba", "granitemoehybrid", "deepseek_v32")
OLD = Versions(versions.TESTED["lmcache"][-1], versions.TESTED["vllm"][0], None)
NEW = Versions(versions.TESTED["lmcache"][0], GROUPS_SINCE_VLLM, None)


def config(kind: str):
    return AutoConfig.for_model(kind).get_text_config()


@pytest.mark.parametrize("kind", SERVED)
def test_models_of_attention_alone_are_served(kind):
    assert check_offload(config(kind)).note == ""


@pytest.mark.parametrize(("kind", "factor"), AT_A_PRICE.items())
def test_windows_are_served_at_a_price_that_is_said(kind, factor):
    kinds = check_offload(config(kind))
    assert kinds.factor == pytest.approx(factor, rel=0.01)
    assert f"{kinds.factor:.1f} times the KV cache" in kinds.note


@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
def test_others_are_refused_with_the_cause(kind, why):
    with pytest.raises(SettingsError, match=re.escape(why)) as refusal:
        check_offload(config(kind))
    assert "--no-offload" in refusal.value.fix


@pytest.mark.parametrize("kind", [*SERVED, *AT_A_PRICE, *REFUSED])
def test_the_server_takes_what_has_attention(kind):
    if kind in NOWHERE:
        with pytest.raises(SettingsError, match="--no-offload"):
            check_offload(config(kind), "server", NEW)
        return
    check_offload(config(kind), "server", NEW)
    if kind in REFUSED:
        with pytest.raises(SettingsError, match="--cache server"):
            check_offload(config(kind))


def test_older_vllm_is_refused_where_there_are_several_groups():
    for kind in ("gpt_oss", "qwen3_5", "gemma4_text", "llama4_text"):
        with pytest.raises(VersionError, match=f"vLLM {GROUPS_SINCE_VLLM} or newer"):
            check_offload(config(kind), "server", OLD)
    check_offload(config("mistral"), "server", OLD)
    check_offload(config("llama"), "server", OLD)


@pytest.mark.parametrize("command", [["serve", "--dry-run"], ["serve"], ["doctor", "--model"]])
def test_with_the_server_all_commands_judge_the_installed_versions(command, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    monkeypatch.setenv("LMCACHE_XPU_CACHE", "server")
    config("qwen3_5").save_pretrained(tmp_path)
    monkeypatch.setattr(model_support, "installed", lambda: OLD)
    done = CliRunner().invoke(app, [*command, str(tmp_path)], catch_exceptions=False)
    assert done.exit_code, done.output
    assert f"vLLM {GROUPS_SINCE_VLLM} or newer" in " ".join(done.output.split())


@pytest.mark.parametrize(("options", "chunk"), [([], 1), (["--chunk-tokens", "544"], 544)])
def test_a_model_with_states_has_chunks_of_one_block_unless_told(
    options, chunk, tmp_path, monkeypatch
):
    config("qwen3_5").save_pretrained(tmp_path)
    monkeypatch.setattr(model_support, "installed", lambda: NEW)
    monkeypatch.setattr(serve, "built_for", lambda: "xpu")
    command = ["serve", str(tmp_path), "--dry-run", "--cache", "server", *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert f"--chunk-size {chunk} " in done.output


def test_the_page_on_models_names_them_all():
    """In its three tables: by transformers' name, which a model's config.json has."""
    text = PAGE.read_text()
    _, served, price, refused = re.split(
        r"^## (?:Served|Served at a price|Served by LMCache's server alone)$",
        text,
        maxsplit=3,
        flags=re.M,
    )
    for part, kinds in ((served, SERVED), (price, AT_A_PRICE), (refused, REFUSED)):
        assert [kind for kind in kinds if f"`{kind}`" not in part] == []


def test_the_page_names_the_versions_that_are_accepted():
    text = PAGE.read_text()
    for name, accepted in (
        ("vLLM", versions.TESTED["vllm"]),
        ("LMCache", versions.TESTED["lmcache"]),
    ):
        assert f"| {name} | {', '.join(accepted)} |" in text


@pytest.mark.parametrize("kind", ["mistral", "qwen3_next", "gemma4_text"])
def test_all_commands_refuse_in_the_same_words_before_vllm_starts(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    monkeypatch.setenv("LMCACHE_XPU_CACHE", "in-process")
    model = tmp_path / "model"
    config(kind).save_pretrained(model)
    with pytest.raises(SettingsError) as refusal:
        check_offload(config(kind))
    said = {}
    for command in (["size"], ["serve", "--dry-run"], ["serve"], ["doctor", "--model"]):
        done = CliRunner().invoke(app, [*command, str(model)], catch_exceptions=False)
        said[" ".join(command)] = " ".join(done.output.split())
        assert done.exit_code == (1 if command[0] == "doctor" else 2), done.output
    for words in (refusal.value.found, refusal.value.fix):
        assert [command for command, text in said.items() if words not in text] == []
    plain = CliRunner().invoke(app, ["serve", str(model), "--dry-run", "--no-offload"])
    assert plain.exit_code == 0


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


def saved(kind: str, path, **settings) -> Settings:
    config(kind).save_pretrained(path)
    return Settings.load({"model": str(path), **settings})


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("llama", "in-process"),
        ("gemma3_text", "server"),  # in the engine's process it takes six times the memory
        ("gpt_oss", "server"),
        ("qwen3_5", "server"),
        ("mistral", "server"),
        ("gemma4_text", "server"),
    ],
)
def test_models_with_windows_or_states_get_a_server_unless_told(kind, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(model_support, "installed", lambda: NEW)
    assert with_cache(saved(kind, tmp_path)).cache == cache
    assert with_cache(saved(kind, tmp_path, cache="in-process")).cache == "in-process"


def test_what_a_server_lacks_or_an_older_vllm_keeps_a_model_in_the_engines_process(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model_support, "installed", lambda: NEW)
    assert with_cache(saved("gpt_oss", tmp_path, kv_events="tcp://*:5557")).cache == "in-process"
    with pytest.raises(SettingsError, match="layers of linear_attention"):
        check_layers(saved("qwen3_5", tmp_path, kv_events="tcp://*:5557"))
    monkeypatch.setattr(model_support, "installed", lambda: OLD)
    assert with_cache(saved("gpt_oss", tmp_path)).cache == "in-process"
    with pytest.raises(VersionError, match=f"vLLM {GROUPS_SINCE_VLLM} or newer"):
        check_layers(saved("qwen3_5", tmp_path))


@pytest.mark.parametrize("kind", ["deepseek_v32"])
def test_what_neither_serves_is_refused_unless_nothing_is_offloaded(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(model_support, "installed", lambda: NEW)
    with pytest.raises(SettingsError, match="--no-offload"):
        check_layers(saved(kind, tmp_path))
    assert check_layers(saved(kind, tmp_path, offload=False)) is None


def test_a_model_that_is_not_here_is_left_to_the_engine(tmp_path):
    assert with_cache(Settings.load({"model": "nobody/nothing"})).cache == "in-process"


def test_serve_says_where_it_runs_lmcache_and_why(tmp_path, monkeypatch):
    config("qwen3_5").save_pretrained(tmp_path)
    monkeypatch.setattr(model_support, "installed", lambda: NEW)
    monkeypatch.setattr(serve, "built_for", lambda: "xpu")
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--dry-run"], catch_exceptions=False)
    assert "LMCache runs as a server beside the engine" in done.output
    assert "--chunk-size 1 " in done.output
    assert "LMCacheXPUServerConnector" in done.output
