"""The command line: options made from the settings, errors in one line, a fast start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_xpu import __version__
from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.launch.settings import Settings

runner = CliRunner()


@pytest.fixture
def served(monkeypatch):
    """What `serve` is called with, instead of serving."""
    calls = []
    monkeypatch.setattr(
        "lmcache_xpu.launch.serve.serve",
        lambda settings, check, dry_run: calls.append((settings, dry_run)),
    )
    return calls


def run(*args):
    return runner.invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def test_every_setting_has_an_option_except_the_key():
    shown = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    missing = {n for n in Settings.model_fields if f"--{n.replace('_', '-')}" not in shown}
    assert missing == {"model", "extra_args", "api_key", "remote_password"}
    assert "--no-offload" in shown
    assert "(default: 256)" in shown
    assert "LMCACHE_XPU_API_KEY" in shown


def test_options_become_settings_with_their_types(served):
    result = run(
        *("serve", "org/model", "--port", 9000, "--no-offload", "--cpu-gib", 0.5, "--dry-run"),
        *("--disk-path", "/d", "--disk-gib", 2, "--device", "xpu", "--layerwise"),
        *("--", "--seed", "3", "--enable-x"),
    )
    assert result.exit_code == 0, result.output
    [(settings, dry_run)] = served
    assert dry_run is True
    assert settings == Settings.load(
        {
            "model": "org/model",
            "port": 9000,
            "offload": False,
            "cpu_gib": 0.5,
            "disk_path": Path("/d"),
            "disk_gib": 2.0,
            "device": "xpu",
            "layerwise": True,
            "extra_args": ("--seed", "3", "--enable-x"),
        }
    )


def test_options_win_over_variables_and_variables_over_defaults(served, monkeypatch):
    monkeypatch.setenv("LMCACHE_XPU_PORT", "9001")
    monkeypatch.setenv("LMCACHE_XPU_CPU_GIB", "3")
    monkeypatch.setenv("LMCACHE_XPU_OFFLOAD", "false")
    run("serve", "m", "--port", 9000, "--offload")
    [(settings, dry_run)] = served
    assert (settings.port, settings.cpu_gib, settings.offload) == (9000, 3.0, True)
    assert dry_run is False


def test_a_mistake_is_one_line_on_stderr_and_code_2():
    result = run("serve", "m", "--chunk-tokens", 0)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("lmcache-xpu: found chunk_tokens=0; expected")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_is_one_line_and_code_130(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_xpu.launch.serve.serve", interrupted)
    result = run("serve", "m")
    assert (result.exit_code, result.stderr) == (130, "lmcache-xpu: interrupted\n")


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_server_that_is_not_there_is_one_line_and_no_engine(how, monkeypatch):
    url = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("ran"))
    result = run("serve", "m", f"--port={free_port()}", "--cache=server", "--server-url", url, *how)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no answer from an LMCache server at {url};" in result.stderr
    assert "leave server_url unset" in result.stderr
    assert result.stderr.count("\n") == 1


def test_brackets_in_a_message_are_not_markup(monkeypatch):
    def fail(settings, check, dry_run):
        raise SettingsError("[red]x[/red] [/]", "y")

    monkeypatch.setattr("lmcache_xpu.launch.serve.serve", fail)
    assert "[red]x[/red] [/]" in run("serve", "m").stderr


def test_a_bug_is_not_dressed_up_as_a_mistake(monkeypatch):
    def fail(settings, check, dry_run):
        raise ZeroDivisionError

    monkeypatch.setattr("lmcache_xpu.launch.serve.serve", fail)
    with pytest.raises(ZeroDivisionError):
        run("serve", "m")


def test_an_unknown_option_is_refused():
    result = run("serve", "m", "--chunk-token", 5)
    assert result.exit_code == 2
    assert "chunk-token" in result.stderr


def test_a_value_that_is_none_of_a_list_is_told_without_other_libraries_words():
    result = run("serve", "m", "--cache", "redis")
    assert result.exit_code == 2
    assert "'redis' is not one of" in result.stderr
    assert "Value error" not in result.stderr


def test_a_shell_completes_the_commands():
    result = runner.invoke(app, [], env={"_LMCACHE_XPU_COMPLETE": "complete_bash",
        "COMP_WORDS": "lmcache-xpu si", "COMP_CWORD": "1"}, prog_name="lmcache-xpu")  # fmt: skip
    assert "size" in result.stdout.split()


def test_the_version():
    assert run("--version").stdout.strip() == __version__


def test_help_imports_neither_torch_nor_vllm():
    program = (
        "import sys\n"
        "from lmcache_xpu.cli import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'lmcache', 'transformers', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 10


def test_the_demo_gets_its_options(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("lmcache_xpu.harness.demo.tell", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    result = run("demo", "--work", tmp_path, "--port", 9)
    assert result.exit_code == 0, result.output
    assert calls == [((), {"work": tmp_path, "port": 9})]
