"""How a server is asked where chunks are: an imitated one, with real shared memory."""

from __future__ import annotations

import pytest
import torch
from support.lending import Client, Connection, Key, chunks_of, copies, filled, succeeds

pytest.importorskip("vllm")

from support.step_loading import failures

from lmcache_xpu.cache.hit_places import LOCATE, RELEASE, sent
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.errors import SettingsError

KEY = Key(tuple(range(24)), 0, 24)
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
TIMEOUT_S = 0.3


@pytest.fixture
def worker():
    """The transfers of a worker, and its layers."""
    client, caches = Client(), {f"layer {n}": filled(n) for n in range(3)}
    transfers = Transfers(Connection(client), [copies(caches)], TIMEOUT_S, caches)
    transfers.register()
    client.calls.clear()
    yield client, transfers, list(caches.values())
    transfers.close()
    client.close()


def store(client: Client, transfers: Transfers) -> bool:
    """Store a prompt, which is then looked up."""
    client.asked["request"] = KEY
    return succeeds(transfers.store(chunks_of(STORED), transfers.event(), ()))


def load(transfers: Transfers, blocks: list[int] = LOADED, **chunks: int) -> bool:
    return succeeds(transfers.load(chunks_of(blocks, **chunks), transfers.event()))


def test_what_the_module_names_is_loaded(worker):
    client, transfers, layers = worker
    before = [layer.clone() for layer in layers]
    assert store(client, transfers)
    client.calls.clear()
    assert load(transfers)
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[LOADED], was[STORED])
    assert client.calls == [LOCATE, RELEASE]


def test_the_end_of_a_hit_is_loaded_where_it_lies(worker):
    client, transfers, layers = worker
    before = layers[0].clone()
    assert store(client, transfers)
    blocks = LOADED[:4]
    assert load(transfers, blocks, start=8)
    assert torch.equal(layers[0][blocks], before[STORED[2:]])


@pytest.mark.parametrize("lost", [0, 2])
def test_a_chunk_that_the_server_lost_is_missing_and_nothing_is_read(worker, lost: int):
    client, transfers, layers = worker
    assert store(client, transfers)
    del client.objects[0, KEY.names()[lost]]
    client.calls.clear()
    before = layers[0].clone()
    assert not load(transfers)
    assert torch.equal(layers[0], before)
    assert RELEASE not in client.calls  # nothing was lent


def test_places_of_another_prompt_are_seen_by_their_seals(worker):
    """Two engines of one server may name two requests alike."""
    client, transfers, layers = worker
    assert store(client, transfers)
    other = Key(tuple(range(100, 124)), 0, 24)
    names = other.names()
    for name, mine in zip(names, KEY.names(), strict=True):
        client.objects[0, name] = client.objects[0, mine]
    client.asked["request"] = KEY
    before = layers[0].clone()
    assert not load(transfers, first=100)
    assert torch.equal(layers[0], before)
    assert transfers.take_damaged() == {"request"}


@pytest.mark.parametrize("payload", [b"\xc1", sent([(1, 0, 0, 32)])], ids=["rubbish", "a group"])
def test_an_answer_of_another_form_is_an_error_and_the_chunks_are_given_back(
    worker, monkeypatch, payload
):
    client, transfers, _ = worker
    assert store(client, transfers)
    client.calls.clear()
    call = client.server_module_call

    def answering(request):
        answer = call(request)
        if request.method == LOCATE:
            answer.result().payload = payload
        return answer

    monkeypatch.setattr(client, "server_module_call", answering)
    count = failures("load", "TransferError")
    assert not load(transfers)
    assert client.calls == [LOCATE, RELEASE]
    assert failures("load", "TransferError") == count + 1


def test_a_server_without_the_module_is_refused_with_the_way_to_get_it():
    client = Client(module=False)
    transfers = Transfers(Connection(client), [copies({"layer": filled(0)})], TIMEOUT_S, ())
    with pytest.raises(SettingsError, match=r"without this package's module.*lmcache-xpu-server"):
        transfers.register()
    transfers.close()
    client.close()
