"""Each check of `lmcache-xpu doctor`, on a planted machine where this one can't show it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys

import pytest
from support.checks import B60, GIB, load, said
from support.scripts import forks

from lmcache_xpu import doctor
from lmcache_xpu.cli.doctor import _conclusion
from lmcache_xpu.doctor import check_start, memory
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.launch.machine import Machine


def run(*args, **environ):
    program = [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", "doctor", *args]
    env = {**os.environ, **environ}
    return subprocess.run(program, env=env, capture_output=True, text=True)


def run_in_fork(*args, **environ):
    """As `run`, in a process that begins with vLLM imported."""
    program = ["-c", "from lmcache_xpu.cli import app; app()", "doctor", *args]
    return forks().run(program, 100, **environ)


def test_the_command_says_what_is_wrong_in_both_languages(tmp_path):
    bad = {"LMCACHE_XPU_CPU_GIB": "100000", "LMCACHE_XPU_MODEL": str(tmp_path)}
    done = run_in_fork("--json", **bad)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    failed = {c["name"]: c["advice"] for c in report["checks"] if c["outcome"] == "fail"}
    assert set(failed) == {"host memory", "model"}
    done = run(**bad, COLUMNS="200")
    assert done.returncode == 1
    assert "Lower cpu_gib" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Not ready: 2 checks failed (host memory, model), ")
    assert done.stderr == ""  # nothing of what vLLM and LMCache log as they are imported


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_pipe_sees_a_line_before_anything_slow_is_imported(command, tmp_path):
    """The import is stood in for by one that never ends."""
    for name in ("vllm", "torch", "lmcache"):
        (tmp_path / f"{name}.py").write_text("import time; time.sleep(100)")
    program = [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", command]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=env) as process:
        line = process.stdout.readline()
        process.kill()
    assert line in ("This machine, for an engine:\n", "Installed here\n")


@pytest.mark.parametrize(
    ("failed", "warnings", "said"),
    [
        ([], 0, "Ready: no check failed, 0 warnings. Next: lmcache-xpu serve org/m"),
        ([], 1, "Ready: no check failed, 1 warning. Next: lmcache-xpu serve org/m"),
        (["port"], 2, "Not ready: 1 check failed (port), 2 warnings. Next: follow the advice"),
    ],
)
def test_one_sentence_says_what_comes_next(failed, warnings, said):
    assert _conclusion(failed, warnings, "org/m", build=False).startswith(said)
    assert "serve" not in _conclusion(failed, warnings, None, build=True)


def test_the_build_needs_neither_device_nor_settings():
    # Nor the directory that an engine makes: in a container its variable is always set.
    never_made = {"PROMETHEUS_MULTIPROC_DIR": "/no/such"}
    done = run_in_fork("--build", "--json", LMCACHE_XPU_CPU_GIB="100000", **never_made)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), report
    assert [c["name"] for c in report["checks"]] == [
        *("versions", "imports", "packages", "patches", "kernels", "pinning")
    ]


def test_no_check_of_the_gpu_is_left_out(machine, monkeypatch):
    monkeypatch.setattr(doctor, "resolve_device", lambda s: s.model_copy(update={"device": "xpu"}))
    monkeypatch.setattr(doctor, "examine_build", lambda _: iter(()))
    names = [check.name for check in doctor.examine(load(port=65431), machine())]
    assert {"device nodes", "kernel driver", "oneAPI runtime", "PyTorch's devices"} <= set(names)
    assert {"pinned memory", "copy engine"} <= set(names)
    assert "memory handles" not in names
    two = dataclasses.replace(B60, gpus=B60.gpus * 2)
    rival = machine(torch=lambda: two, environ={"VLLM_CPU_KVCACHE_SPACE": "8"})
    checks = {
        check.name: check for check in doctor.examine(load(port=65431, tensor_parallel=2), rival)
    }
    assert "memory handles" in checks
    assert said(checks["environment"], "fail", "Unset VLLM_CPU_KVCACHE_SPACE")
    assert said(checks["port"], "ok", ":65431 is free")


# Before `serve` becomes vLLM


@pytest.fixture
def settings():
    """Settings that the planted machine serves without a word."""

    def make(**changes):
        return load(**{"device": "xpu", "port": free_port(), "cpu_gib": 8} | changes)

    return make


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_machine_that_is_right_is_not_mentioned(machine, settings, root, caplog):
    check_start(settings(disk_path=root / "data", disk_gib=0.01), machine())
    assert warnings(caplog) == []


def test_several_gpus_that_may_hang_are_mentioned_before_the_start(machine, settings, caplog):
    refused = machine(refusal=lambda: "Operation not permitted")
    check_start(settings(), refused)
    assert warnings(caplog) == []
    for parallel in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
        caplog.clear()
        check_start(settings(**{parallel: 2}), refused)
        [line] = [line for line in warnings(caplog) if "memory handles" in line]
        assert "SYS_PTRACE" in line


def test_a_failed_check_is_refused_in_the_doctors_words(machine, settings):
    """48 of 64 GiB are available."""
    check = memory.check_memory(machine(), settings(cpu_gib=50))
    with pytest.raises(SettingsError) as refused:
        check_start(settings(cpu_gib=50), machine())
    assert check.outcome == "fail"
    assert check.found in str(refused.value)
    assert check.advice in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_refusal_says_what_the_check_expects(machine, settings, root):
    (root / "file").touch()
    with pytest.raises(SettingsError, match=r"can't be written.*; expected .* may write to"):
        check_start(settings(disk_path=root / "file", disk_gib=0.01), machine())


def test_what_is_refused_depends_on_the_device(machine, settings, tmp_path):
    closed = machine(may_open=lambda _: False)
    with pytest.raises(SettingsError, match=r"device nodes: renderD128.*RENDER_GID"):
        check_start(settings(), closed)
    check_start(settings(offload=False, device="cuda"), closed)
    no_compiler = machine(environ={"PATH": str(tmp_path / "nowhere")})
    with pytest.raises(SettingsError, match=r"no g\+\+; .*enforce_eager"):
        check_start(settings(device="cpu"), no_compiler)
    check_start(settings(device="cpu", enforce_eager=True), no_compiler)


@pytest.mark.parametrize(
    ("changes", "planted", "words"),
    [
        ({"cpu_gib": 40}, {}, "host memory: .* Lower cpu_gib"),
        ({"disk_gib": 1e6}, {}, r"disk tier: .*GiB to be had; disk_gib x devices is 1e\+06"),
    ],
)
def test_a_warning_is_one_line(machine, settings, root, caplog, changes, planted, words):
    disk = {"disk_path": root / "data"} if "disk_gib" in changes else {}
    check_start(settings(**changes, **disk), machine(**planted))
    [line] = warnings(caplog)
    assert line.startswith("lmcache-xpu: ")
    assert re.search(words, line)
    assert line.endswith("(docs: troubleshooting#start-warning)")
    assert "\n" not in line


def test_without_offload_the_tiers_are_not_looked_at(machine, settings, caplog):
    check_start(settings(cpu_gib=1000, offload=False), machine())
    assert warnings(caplog) == []


def test_it_imports_no_pytorch():
    """A second of waiting, and of memory that the engine could have."""
    program = (
        "import sys, lmcache_xpu.doctor\n"
        "heavy = {'torch', 'vllm', 'lmcache', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_ends_with_one_line_and_code_2(tmp_path):
    """In a process of its own, with the machine's real memory: all of it is never available."""
    total_gib = Machine().memory_bytes() / GIB
    command = [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", "serve", "org/model"]
    options = [f"--port={free_port()}", f"--cpu-gib={0.999 * total_gib}", "--enforce-eager"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lmcache-xpu: found host memory: a CPU tier of")
    assert done.stderr.count("\n") == 1
