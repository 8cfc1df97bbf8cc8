"""Look-ups by a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_xpu.cache_engine.near_lookups import NearLookups


class Far:
    """LMCache's transport."""

    world_size = 1

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.closed = False

    def send_and_recv_all(self, message: list[Any]) -> list[bytes]:
        self.asked.append(message)
        return [(7).to_bytes(4, "big")]

    def close(self) -> None:
        self.closed = True


class Engine:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def lookup(self, **question: Any) -> int:
        self.asked.append(question)
        return sum(question["offsets"])


@pytest.mark.parametrize(("options", "read"), [("", None), ('{"ttl": 3}', {"ttl": 3})])
def test_a_worker_in_this_process_is_asked_as_lmcache_asks_it(options: str, read: Any):
    far, engine = Far(), Engine()
    near = NearLookups(far, lambda: engine)
    answer = near.send_and_recv_all([[11, 12], [256, 300], "request", options])
    assert [int.from_bytes(one, "big") for one in answer] == [556]
    (question,) = engine.asked
    assert question == {
        "hashes": [11, 12],
        "offsets": [256, 300],
        "lookup_id": "request",
        "pin": True,
        "request_configs": read,
    }
    assert far.asked == []


def test_any_other_through_lmcaches_transport():
    far = Far()
    near = NearLookups(far, lambda: None)
    assert near.send_and_recv_all(message := [[1], [256], "r", ""]) == [b"\0\0\0\7"]
    assert far.asked == [message]
    assert near.world_size == 1
    near.close()
    assert far.closed


def test_an_error_is_a_miss(caplog: pytest.LogCaptureFixture):
    def lookup(**_: Any) -> int:
        raise OSError("planted")

    near = NearLookups(Far(), lambda: SimpleNamespace(lookup=lookup))
    assert near.send_and_recv_all([[1], [256], "r", ""]) == []
    assert "planted" in caplog.text
