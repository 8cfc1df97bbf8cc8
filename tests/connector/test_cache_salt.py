"""Requests with a salt, an adapter or embeddings have keys of their own."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from support.requests import request

from lmcache_xpu.connector.cache_salt import salt_of
from lmcache_xpu.model import adapter_names


def adapter(path, name="a"):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_most_requests_have_none():
    assert salt_of(request()) == ""
    assert salt_of(request(cache_salt="a")) != salt_of(request(cache_salt="b"))


@pytest.mark.parametrize("change", ["name", "weights"])
def test_an_adapter_is_its_name_and_its_weights(tmp_path, change, monkeypatch):
    monkeypatch.setattr(adapter_names, "_TICK_NS", 0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.bin").write_bytes(
            (name if change == "weights" else "same").encode() * 100
        )
    time.sleep(0.02)
    monkeypatch.setattr(adapter_names, "_BEGAN_NS", time.time_ns())
    salt = salt_of(request(lora=adapter(tmp_path / "one", "a")))
    assert salt is not None
    two = salt_of(request(lora=adapter(tmp_path / "two", "b" if change == "name" else "a")))
    assert salt != two
    assert salt == salt_of(request(lora=adapter(tmp_path / "one", "a")))


def test_embeddings_have_no_name():
    assert salt_of(request(prompt_embeds=torch.zeros(4, 4))) is None
