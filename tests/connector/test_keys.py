from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from lmcache_xpu.connector import keys as module
from lmcache_xpu.connector.keys import Keys

SALT_LENGTH = 128  # LMCache's limit


@pytest.fixture
def keys(monkeypatch):
    return make(monkeypatch, "weights")


def make(monkeypatch, weights):
    monkeypatch.setattr(module, "packing_marks", lambda *_: [weights])
    return Keys(None, SimpleNamespace(kv_cache_groups=[]), 8)


def request(name, tokens=tuple(range(20)), salt=None, embeds=None, lora=None):
    return SimpleNamespace(
        request_id=name,
        all_token_ids=list(tokens),
        cache_salt=salt,
        lora_request=lora,
        prompt_embeds=embeds,
    )


def test_requests_share_unless_something_sets_them_apart(keys, tmp_path):
    lora = SimpleNamespace(lora_name="adapter", lora_path=str(tmp_path))
    common = keys.admit(request("a"), 0)
    assert keys.admit(request("b"), 0) == common
    assert keys.admit(request("c", tokens=range(100, 120)), 0) == common  # the tokens do
    others = [
        keys.admit(request("d", salt="client"), 0),
        keys.admit(request("e", lora=lora), 0),
        keys.admit(request("f", embeds=object()), 0),
        keys.admit(request("g", embeds=object()), 0),
    ]
    assert len({common, *others}) == 5


def test_a_salt_is_one_that_lmcache_takes(keys):
    salt = keys.admit(request("a", salt="/@*" * 500), 0)
    assert len(salt) <= SALT_LENGTH
    assert salt.isalnum()


def test_other_weights_have_other_keys_and_the_same_ones_in_every_process(monkeypatch):
    first, second, other = (make(monkeypatch, w).admit(request("a"), 0) for w in "aab")
    assert first == second
    assert first != other


def test_a_reset_changes_all_keys_and_keeps_running_requests_from_storing(keys):
    before = keys.admit(request("running"), 0)
    assert keys.may_store("running")
    keys.reset()
    assert not keys.may_store("running")
    assert keys.admit(request("new"), 0) != before
    assert keys.may_store("new")


def test_prompts_that_begin_as_a_damaged_one_get_other_keys(keys):
    damaged, other = request("a"), request("b", tokens=range(1, 21))
    before, of_other = keys.admit(damaged, 0), keys.admit(other, 0)
    keys.damaged("a")
    longer = request("c", tokens=range(40))
    assert keys.admit(longer, 0) != before
    assert keys.admit(longer, 0) == keys.admit(damaged, 0)
    assert keys.admit(other, 0) == of_other
    keys.finished("a")
    keys.damaged("a")  # it has ended
    assert keys.admit(damaged, 0) == keys.admit(longer, 0)


def test_only_so_many_beginnings_are_remembered(keys, monkeypatch):
    monkeypatch.setattr(module, "_BEGINNINGS", 1)
    first = keys.admit(request("a"), 0)
    keys.damaged("a")
    keys.admit(request("b", tokens=range(50, 70)), 0)
    keys.damaged("b")
    assert keys.admit(request("a"), 0) == first
