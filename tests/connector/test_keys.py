"""What sets requests apart: salts, adapters, embeddings, weights, and resets."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from lmcache_xpu.connector import keys as module
from lmcache_xpu.connector.keys import Keys, salt_of
from lmcache_xpu.model import adapter_names

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


def salt(keys: Keys, request: SimpleNamespace, kept: int) -> str:
    return keys.admit(request, kept)[0]


def test_requests_share_unless_something_sets_them_apart(keys, tmp_path):
    lora = SimpleNamespace(lora_name="adapter", lora_path=str(tmp_path))
    common = salt(keys, request("a"), 0)
    assert salt(keys, request("b"), 0) == common
    assert salt(keys, request("c", tokens=range(100, 120)), 0) == common  # the tokens do
    others = [
        salt(keys, request("d", salt="client"), 0),
        salt(keys, request("e", lora=lora), 0),
        salt(keys, request("f", embeds=object()), 0),
        salt(keys, request("g", embeds=object()), 0),
    ]
    assert len({common, *others}) == 5


def test_a_salt_is_one_that_lmcache_takes(keys):
    made = salt(keys, request("a", salt="/@*" * 500), 0)
    assert len(made) <= SALT_LENGTH
    assert made.isalnum()


def test_other_weights_have_other_keys_and_the_same_ones_in_every_process(monkeypatch):
    first, second, other = (salt(make(monkeypatch, w), request("a"), 0) for w in "aab")
    assert first == second
    assert first != other


def may_store(keys: Keys, name: str, kept: int = 0) -> bool:
    return keys.admit(request(name), kept)[1]


def test_each_epoch_has_other_keys(keys):
    salts = {salt(keys, request("a"), 0)}
    for _ in range(3):
        keys.reset()
        salts.add(salt(keys, request("a"), 0))
        assert may_store(keys, "a")
    assert len(salts) == 4


class Pool:
    """vLLM's blocks; one of them is never used."""

    def __init__(self, *, cached: int = 0, used: int = 0) -> None:
        self.num_gpu_blocks = 10
        self.cached_block_hash_to_block = dict.fromkeys(range(cached))
        self.used = used

    def get_num_free_blocks(self) -> int:
        return 9 - self.used


@pytest.mark.parametrize("pool", [None, Pool(cached=1), Pool(used=1)])
def test_what_vllm_kept_of_an_earlier_epoch_is_neither_stored_nor_found(keys, pool):
    keys.pool = pool
    assert may_store(keys, "of the first", 16)
    keys.reset()
    assert may_store(keys, "new")
    assert not may_store(keys, "kept", 16)
    assert salt(keys, request("kept"), 16) != salt(keys, request("kept"), 16)
    keys.pool = Pool()  # all is given back
    assert may_store(keys, "later", 16)
    keys.pool = Pool(cached=3, used=2)  # of this epoch
    assert may_store(keys, "at last", 16)


def test_prompts_that_begin_as_a_damaged_one_get_other_keys(keys):
    damaged, other = request("a"), request("b", tokens=range(1, 21))
    before, of_other = salt(keys, damaged, 0), salt(keys, other, 0)
    keys.damaged("a")
    longer = request("c", tokens=range(40))
    assert salt(keys, longer, 0) != before
    assert salt(keys, longer, 0) == salt(keys, damaged, 0)
    assert salt(keys, other, 0) == of_other
    keys.finished("a")
    keys.damaged("a")  # it has ended
    assert salt(keys, damaged, 0) == salt(keys, longer, 0)


def test_only_so_many_beginnings_are_remembered(keys, monkeypatch):
    monkeypatch.setattr(module, "MOST_DAMAGED", 1)
    first = salt(keys, request("a"), 0)
    keys.damaged("a")
    salt(keys, request("b", tokens=range(50, 70)), 0)
    keys.damaged("b")
    assert salt(keys, request("a"), 0) == first


# Of a request alone


def adapter(path, name="a"):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_most_requests_have_none():
    assert salt_of(request("a")) == ""
    assert salt_of(request("a", salt="a")) != salt_of(request("a", salt="b"))


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
    salt = salt_of(request("a", lora=adapter(tmp_path / "one", "a")))
    assert salt is not None
    two = salt_of(request("a", lora=adapter(tmp_path / "two", "b" if change == "name" else "a")))
    assert salt != two
    assert salt == salt_of(request("a", lora=adapter(tmp_path / "one", "a")))


def test_embeddings_have_no_name():
    assert salt_of(request("a", embeds=torch.zeros(4, 4))) is None
