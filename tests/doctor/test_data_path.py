"""Checks of what an image will move KV cache with."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.checks import said

from lmcache_xpu.doctor import software
from lmcache_xpu.versions import TESTED, Versions


def test_kernels(monkeypatch):
    assert software.check_kernels("cpu").outcome == "skip"
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: object())
    assert said(software.check_kernels("xpu"), "ok", "Triton", "on xpu")
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    assert said(software.check_kernels("xpu"), "warn", "no Triton")


def test_pinning_where_vllms_kernels_can_not_be_loaded():
    assert software.check_pinning("cpu").outcome == "skip"
    assert said(software.check_pinning("xpu"), "fail", "ModuleNotFoundError", "vllm_xpu_kernels")


@pytest.mark.parametrize("operation", ["xpu_host_register", "another"])
def test_pinning(monkeypatch, operation):
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels", ModuleType("vllm_xpu_kernels"))
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels._C", ModuleType("vllm_xpu_kernels._C"))
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(**{operation: print}))
    check = software.check_pinning("xpu")
    assert check.outcome == ("ok" if operation == "xpu_host_register" else "warn")
    assert "vllm-xpu-kernels" in check.found


def test_a_release_with_changes_is_named_and_not_refused():
    accepted = {name: all_[0] for name, all_ in TESTED.items()}
    changed = "1.2.3.dev0+g568afb3a1.d20260907.xpu"
    patched = Versions(**accepted, torch=None, changed=changed)
    said_of_it = f"{accepted['vllm']} with changes"
    assert said(software.check_versions(patched, {}), "warn", changed, said_of_it)
