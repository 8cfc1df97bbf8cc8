"""Each check of `lmcache-xpu doctor`, on a planted machine where this one can't show it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
from support.checks import B60, load, said

from lmcache_xpu import doctor
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.preflight import preflight


def test_serve_stops_for_the_same_reasons(machine, root):
    settings = load(device="xpu", port=65431)
    with pytest.raises(SettingsError, match="RENDER_GID"):
        preflight(settings, {}, machine(may_open=lambda _: False))
    shutil.rmtree(root / "dev/dri")
    with pytest.raises(SettingsError, match=r"no renderD\*"):
        preflight(settings, {}, machine())


# Driver, runtime, PyTorch


def run(*args, **environ):
    program = [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", "doctor", *args]
    env = {**os.environ, **environ}
    return subprocess.run(program, env=env, capture_output=True, text=True)


def test_the_command_says_what_is_wrong_in_both_languages(tmp_path):
    bad = {"LMCACHE_XPU_CPU_GIB": "100000", "LMCACHE_XPU_MODEL": str(tmp_path)}
    done = run("--json", **bad)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    failed = {c["name"]: c["advice"] for c in report["checks"] if c["outcome"] == "fail"}
    assert set(failed) == {"host memory", "model"}
    done = run(**bad, COLUMNS="200")
    assert done.returncode == 1
    assert "Lower cpu_gib" in done.stdout
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


def test_the_build_needs_neither_device_nor_settings():
    # Nor the directory that an engine makes: in a container its variable is always set.
    never_made = {"PROMETHEUS_MULTIPROC_DIR": "/no/such"}
    done = run("--build", "--json", LMCACHE_XPU_CPU_GIB="100000", **never_made)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), report
    assert [c["name"] for c in report["checks"]] == [
        *("versions", "imports", "packages", "patches", "connector", "kernels", "pinning")
    ]


def test_no_check_of_the_gpu_is_left_out(machine, monkeypatch):
    monkeypatch.setattr(doctor, "resolve_device", lambda s: s.model_copy(update={"device": "xpu"}))
    monkeypatch.setattr(doctor, "examine_build", lambda _: iter(()))
    names = [check.name for check in doctor.examine(load(port=65431), machine())]
    assert {"device nodes", "kernel driver", "oneAPI runtime", "PyTorch's devices"} <= set(names)
    assert {"GPU selection", "pinned memory"} <= set(names)
    assert "GPUs together" not in names
    two = dataclasses.replace(B60, gpus=B60.gpus * 2, apart=())
    rival = machine(torch=lambda: two, environ={"VLLM_CPU_KVCACHE_SPACE": "8"})
    checks = {
        check.name: check for check in doctor.examine(load(port=65431, tensor_parallel=2), rival)
    }
    assert "GPUs together" in checks
    assert said(checks["environment"], "fail", "Unset VLLM_CPU_KVCACHE_SPACE")
    assert said(checks["port"], "ok", ":65431 is free")
