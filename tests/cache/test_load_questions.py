"""How a server is asked where chunks are: an imitated one, with real shared memory."""

from __future__ import annotations

import pytest
import torch
from support.lending import Client, Connection, Key, chunks_of, copies, filled, succeeds

pytest.importorskip("vllm")

from lmcache_xpu.cache import load_questions
from lmcache_xpu.cache.hit_places import LOCATE, RELEASE
from lmcache_xpu.cache.load_questions import (
    LMCacheQuestions,
    ModuleQuestions,
    questions_of,
    read_slots,
)
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.errors import SettingsError, TransferError

KEY = Key(tuple(range(24)), 0, 24)
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
TIMEOUT_S = 0.3


@pytest.fixture(params=[True, False], ids=["module", "without"])
def worker(request):
    """The transfers of a worker whose server has the module, or not; and its layers."""
    client, caches = Client(module=request.param), {f"layer {n}": filled(n) for n in range(3)}
    transfers = Transfers(Connection(client), [copies(caches)], TIMEOUT_S)
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


def test_what_the_module_names_is_loaded_as_what_lmcache_names(worker):
    client, transfers, layers = worker
    before = [layer.clone() for layer in layers]
    assert store(client, transfers)
    client.calls.clear()
    assert load(transfers)
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[LOADED], was[STORED])
    own = [LOCATE, RELEASE]
    assert client.calls == (own if client.has_module else ["prepare_retrieve", "commit_retrieve"])


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
    assert not {RELEASE, "commit_retrieve"} & set(client.calls)  # nothing was lent


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


def test_a_server_that_comes_without_the_module_is_asked_as_lmcache_asks_it():
    client = Client(module=True)
    assert isinstance(questions_of(client, 1, [64], [0], TIMEOUT_S), ModuleQuestions)
    assert isinstance(questions_of(client, 1, [64, 32], [0, 2], TIMEOUT_S), ModuleQuestions)
    client.has_module = False
    assert isinstance(questions_of(client, 1, [64], [0], TIMEOUT_S), LMCacheQuestions)
    with pytest.raises(SettingsError, match="without this package's module"):
        questions_of(client, 1, [64, 32], [0, 2], TIMEOUT_S)
    client.close()


def test_a_silent_server_is_waited_for_once_and_shortly(monkeypatch):
    waited = []
    client = Client(module=True)
    client.silent = True
    call = client.server_module_call

    def calling(request):
        answer = call(request)
        wait = answer.wait
        answer.wait = lambda timeout: waited.append(timeout) or wait(0)
        return answer

    monkeypatch.setattr(client, "server_module_call", calling)
    assert isinstance(questions_of(client, 1, [64], [0], 30.0), LMCacheQuestions)
    assert waited == [load_questions.HELLO_S]
    client.close()


@pytest.mark.parametrize("worker", [False], indirect=True, ids=["without"])
def test_an_answer_of_another_form_is_an_error_and_the_chunks_are_given_back(worker, monkeypatch):
    client, transfers, _ = worker
    assert store(client, transfers)
    client.calls.clear()
    other = {"slots": [{"offset": 0}]}  # of no length
    monkeypatch.setattr(load_questions, "read_slots", lambda _: read_slots(other))
    assert not load(transfers)
    assert client.calls == ["prepare_retrieve", "commit_retrieve"]


A, B = ({"offset": 64 * n, "length": 32, "shape": [1, 1, 32]} for n in range(2))


def test_lmcache_names_no_group_and_all_chunks_need_no_numbers():
    slots = read_slots({"slots": [A, B]})
    assert (slots.of_group(0), slots.chunks(0)) == ([(0, 32), (64, 32)], [0, 1])
    assert not read_slots({"slots": [], "chunk_indices": []})


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"slots": None},
        {"slots": [A], "chunk_indices": []},
        {"slots": [{"offset": 0}]},
    ],
    ids=["nothing", "no list", "too few numbers", "no length"],
)
def test_an_answer_of_another_form_is_refused(context):
    with pytest.raises(TransferError):
        read_slots(context)
