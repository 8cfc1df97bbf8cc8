"""Look-ups by a call, and the request whose names are remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from support.adapter import request

from lmcache_xpu.cache_engine.cache_salt import CacheSalts
from lmcache_xpu.cache_engine.lookup_client import LookupClient, NearTransport
from lmcache_xpu.cache_engine.lookup_server import AnsweringTransport, answer_of

CHUNK, BLOCK = 8, 4


class Far:
    """LMCache's transport."""

    def __init__(self, workers: int = 1) -> None:
        self.world_size = workers
        self.asked: list[Any] = []
        self.closed = False

    def send_and_recv_all(self, message: list[Any]) -> list[bytes]:
        self.asked.append(message)
        return [answer_of(7, rank) for rank in range(self.world_size)]

    def close(self) -> None:
        self.closed = True


class Engine:
    """LMCache's engine, which has everything."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def lookup(self, **question: Any) -> int:
        self.asked.append(question)
        return sum(question["offsets"])

    def far_tokens(self, lookup_id: str) -> int:
        """Of the last chunk."""
        return self.asked[-1]["offsets"][-1] if lookup_id == self.asked[-1]["lookup_id"] else 0


def client(far: Far) -> LookupClient:
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, save_unfull_chunk=False)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, (2, 2, CHUNK, 2, 8))
    return LookupClient(config, metadata, far, BLOCK)


@pytest.mark.parametrize(("options", "read"), [("", None), ('{"ttl": 3}', {"ttl": 3})])
def test_a_worker_in_this_process_is_asked_as_lmcache_asks_it(options: str, read: Any):
    far, engine = Far(), Engine()
    near = NearTransport(far)
    near.engine = lambda: engine
    answers = near.send_and_recv_all([[11, 12], [256, 300], "request", options])
    assert [int.from_bytes(answer, "big") for answer in answers] == [556]
    (question,) = engine.asked
    assert question == {
        "hashes": [11, 12],
        "offsets": [256, 300],
        "lookup_id": "request",
        "pin": True,
        "request_configs": read,
    }
    assert far.asked == []


@pytest.mark.parametrize(("workers", "here"), [(1, False), (2, True)])
def test_any_other_is_asked_through_lmcaches_transport(workers: int, here: bool):
    far, engine = Far(workers), Engine()
    near = NearTransport(far)
    if here:
        near.engine = lambda: engine
    message = [[1], [256], "r", ""]
    assert near.send_and_recv_all(message) == [b"\0\0\0\7"] * workers
    assert (far.asked, engine.asked, near.world_size) == ([message], [], workers)
    near.close()
    assert far.closed


def test_an_error_is_a_miss(caplog: pytest.LogCaptureFixture):
    def lookup(**_: Any) -> int:
        raise OSError("planted")

    near = NearTransport(Far())
    near.engine = lambda: SimpleNamespace(lookup=lookup)
    assert near.send_and_recv_all([[1], [256], "r", ""]) == []
    assert "planted" in caplog.text
    asking = client(Far())
    asking.ask_near(lambda: SimpleNamespace(lookup=lookup))
    assert asking.lookup(list(range(CHUNK)), "r") == 0


def test_names_are_remembered_of_the_request_that_was_admitted_and_of_no_other():
    engine, tokens = Engine(), list(range(3 * CHUNK))
    asking = client(Far())
    asking.ask_near(lambda: engine)
    adapter = SimpleNamespace(lookup_client=asking)
    salts = CacheSalts(adapter)
    prompts = {}
    for name in ("admitted", "another"):
        prompts[name] = request(name)
        prompts[name].all_token_ids, prompts[name].mm_features = tokens, ()
        prompts[name].block_hashes = [bytes([n]) for n in range(len(tokens) // BLOCK)]
    salts.admit(prompts["admitted"])
    assert asking.lookup(tokens, "another") == len(tokens)
    assert len(asking.token_database) == 0
    assert asking.lookup(tokens, "admitted") == len(tokens)
    assert len(asking.token_database) == 3
    assert engine.asked[0]["hashes"] == engine.asked[1]["hashes"]
    salts.admit(prompts["another"])
    asking.lookup(tokens, "another")
    assert len(asking.token_database) == 3


@pytest.mark.parametrize(("workers", "far"), [(1, CHUNK), (3, 2)])
def test_it_is_told_how_much_is_not_in_memory(workers: int, far: int):
    """Of one worker here, and of several elsewhere, where the slowest counts."""
    asking, engine = client(Far(workers)), Engine()
    asking.ask_near(lambda: engine)
    asking.lookup(list(range(3 * CHUNK)), "r")
    assert asking.far_tokens("r") == far
    assert asking.far_tokens("another") == 0
    asking.clear_lookup_status("r")
    assert asking.far_tokens("r") == 0


class Socket:
    """LMCache's transport of a server that is asked once."""

    def __init__(self) -> None:
        self.question: Any = (b"who", [[11], [256], "r", ""])
        self.sent: list[Any] = []

    def recv_request(self) -> Any:
        question, self.question = self.question, None
        return question

    def send_response(self, *answer: bytes) -> None:
        self.sent.append(answer)


def test_a_worker_elsewhere_tells_it_of_the_look_up_that_it_answers():
    socket = Socket()
    far = {"r": 256}
    transport = AnsweringTransport(socket, SimpleNamespace(far_tokens=far.get))
    assert transport.recv_request() == (b"who", [[11], [256], "r", ""])
    transport.send_response(b"who", (512).to_bytes(4, "big"))
    assert socket.sent == [(b"who", answer_of(512, 256))]
    assert transport.recv_request() is None
