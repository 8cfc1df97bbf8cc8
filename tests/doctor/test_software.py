"""Checks of what is installed, of variables and of the model."""

from __future__ import annotations

import os

from support.checks import load, said

from lmcache_xpu.doctor import software
from lmcache_xpu.versions import Versions
from lmcache_xpu.vllm_hooks.patches import Status


def test_versions_against_the_tested_ones():
    tested = Versions(lmcache="0.5.6", vllm="0.32.0", torch="2.14.0")
    other = Versions(lmcache="0.4.0", vllm="0.32.0", torch=None)
    assert said(software.check_versions(tested, {}), "ok", "0.32.0")
    assert said(software.check_versions(other, {}), "fail", "0.4.0", "lmcache 0.5.6")
    assert said(software.check_versions(other, {}), "fail", "PyTorch missing")
    allowed = {"LMCACHE_XPU_ALLOW_UNTESTED": "1"}
    assert said(software.check_versions(other, allowed), "warn", "0.4.0")


def test_a_package_that_can_not_be_imported():
    assert said(software.check_imports(("json", "no_such_package")), "fail", "no_such_package")
    assert "scripts/install.py" in software.check_imports(("no_such_package",)).advice


def test_a_patch_that_is_missing():
    versions = {
        "lmcache_version": "",
        "vllm_version": "",
        "torch_version": "",
        "tested": True,
    }
    status = Status(**versions, devices={"xpu": ("A", "B")}, patches={"a.b": True, "c.d": False})
    assert said(software.check_patches(status), "fail", "c.d", "Another package")
    status = Status(**versions, devices={"xpu": ("A", "B")}, patches={})
    assert software.check_patches(status).outcome == "fail"


def test_the_compiler_that_a_cpu_engine_needs(machine):
    none = machine(environ={"PATH": "/nowhere"})
    assert said(software.check_compiler(none, load()), "fail", "no g++", "enforce_eager")
    assert software.check_compiler(none, load(enforce_eager=True)).outcome == "skip"
    here = machine(environ={"PATH": os.environ["PATH"], "CXX": "sh"})
    assert said(software.check_compiler(here, load()), "ok", "sh")


def test_a_model_that_is_not_there():
    assert said(software.check_served_model(load(model="/no/such")), "fail", "config.json")


def test_a_model_that_nobody_can_offload(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    check = software.check_served_model(load(model=str(tmp_path)))
    assert said(check, "fail", "linear_attention", "--no-offload")
    assert software.check_served_model(load(model=str(tmp_path), offload=False)).outcome == "ok"
