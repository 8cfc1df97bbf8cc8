"""Requests with a salt, an adapter or embeddings have keys of their own."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from support.adapter import Adapter, Metadata, request

from lmcache_xpu.cache_engine import adapter_names
from lmcache_xpu.cache_engine.cache_salt import CacheSalts, salt_of, salted


def adapter(path, name="a"):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_most_requests_are_left_as_they_are():
    inner = Adapter()
    salts = CacheSalts(inner)
    salts.admit(request())
    inner.lookup_client.lookup([5, 6, 7], lookup_id="r")
    meta = SimpleNamespace(req_id="r", token_ids=[5, 6])
    salts.mark(Metadata(meta))
    assert inner.asked == [[5, 6, 7]]
    assert meta.token_ids == [5, 6]


def test_a_request_that_computes_its_whole_prompt_finds_nothing():
    inner = Adapter()
    salts = CacheSalts(inner)
    salts.admit(request(computed=True))
    assert inner.lookup_client.lookup([5, 6, 7], lookup_id="r") == 0
    assert inner.asked == []
    salts.finished("r")
    assert inner.forgotten == []  # nothing was pinned
    inner.lookup_client.lookup([5, 6, 7], lookup_id="r")
    assert inner.asked == [[5, 6, 7]]


def test_look_up_and_worker_see_the_same_exchanged_token():
    inner = Adapter()
    salts = CacheSalts(inner)
    salts.admit(request(cache_salt="s"))
    inner.lookup_client.lookup((5, 6, 7), lookup_id="r", request_configs=None)
    meta = SimpleNamespace(req_id="r", token_ids=[5, 6])
    salts.mark(Metadata(meta))
    assert inner.asked[0][0] == meta.token_ids[0]
    assert inner.asked[0][1:] == [6, 7]
    assert 2**62 <= meta.token_ids[0] < 2**63


def test_salts_and_first_tokens_are_told_apart():
    firsts = {salted([token, 1], salt)[0] for token in range(50) for salt in ("a", "b", "1 a")}
    assert len(firsts) == 150


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


def test_a_request_that_was_only_looked_up_is_unpinned_with_the_next_step():
    pytest.importorskip("vllm")
    inner = Adapter()
    salts = CacheSalts(inner)
    for name in ("scheduled", "aborted"):
        inner.lookup_client.lookup([1, 2], lookup_id=name)
    salts.mark(Metadata(SimpleNamespace(req_id="scheduled", token_ids=[1])))
    for name in ("scheduled", "aborted"):
        salts.finished(name)
    following = Metadata()
    salts.mark(following)
    assert [meta.req_id for meta in following.requests] == ["aborted"]
    assert following.requests[0].save_spec is None
    assert inner.forgotten == ["aborted"]
    assert "aborted" not in inner.load_specs
    after = Metadata()
    salts.mark(after)
    assert after.requests == []
