"""The load test's client against a server that cuts its bytes where it hurts, and breaks."""

from __future__ import annotations

import time
from contextlib import ExitStack

import gevent
import pytest
from stub import WORDS

from loadtests.client import OK, StreamingClient

pytestmark = pytest.mark.alone


def ask(url, *, model="stub", tokens=8, client=None, **limits):
    with ExitStack() as stack:
        client = client or stack.enter_context(StreamingClient(url, model=model, **limits))
        return client.chat(
            [{"role": "user", "content": "a b c"}],
            max_tokens=tokens,
            ignore_eos=True,
            headers={"x-request-id": "1"},
        )


def test_an_answer_is_whole_wherever_it_was_cut(stub):
    """Inside of characters, fields and line ends; between comments; with both line ends."""
    reply = ask(stub.url, tokens=64)
    assert (reply.outcome, reply.text) == (OK, "".join(WORDS) * 16)
    assert (reply.prompt_tokens, reply.completion_tokens) == (3, 64)
    assert (len(reply.arrivals_s), len(reply.gaps_s)) == (64, 63)


def test_the_first_token_is_not_the_role(stub):
    """The role's chunk comes 50 ms earlier."""
    reply = ask(stub.url)
    assert reply.ttft_s >= 0.05
    assert reply.e2e_s >= 0.05 + 7 * 0.01
    assert reply.tpot_s == pytest.approx(sum(reply.gaps_s) / 7)


@pytest.mark.parametrize("kind", ["reasoning", "reasoning_content", "tools"])
def test_thoughts_and_tool_calls_are_tokens(stub, kind):
    reply = ask(stub.url, model=f"stub-{kind}", tokens=3)
    assert reply.outcome == OK
    assert len(reply.arrivals_s) == 3
    assert reply.text == "".join(WORDS[1:3])


@pytest.mark.parametrize(
    ("fault", "outcome", "arrivals"),
    [
        ("http-503", "HTTP 503", 0),
        ("silent", "stalled", 0),
        ("stall", "stalled", 3),
        ("error", "error in stream", 3),
        ("junk", "bad event", 3),
        ("cut", "broken off", 3),
        ("no-end", "broken off", 3),
        ("no-text", "no content", 0),
        ("endless", "deadline", None),
    ],
)
def test_every_failure_ends_in_time_and_has_a_kind(stub, fault, outcome, arrivals):
    begin = time.perf_counter()
    reply = ask(stub.url, model=f"stub-{fault}", silence_s=0.3, request_s=0.8)
    assert time.perf_counter() - begin < 1.5
    assert reply.outcome == outcome
    assert reply.detail
    if arrivals is not None:
        assert len(reply.arrivals_s) == arrivals


@pytest.mark.parametrize("fault", ["http-503", "stall", "error", "junk", "cut"])
def test_the_next_answer_is_not_the_rest_of_a_broken_one(stub, fault):
    with StreamingClient(stub.url, model=f"stub-{fault}", silence_s=0.3) as client:
        assert ask(stub.url, client=client).outcome != OK
        client._model = "stub"
        assert ask(stub.url, client=client).text == "".join(WORDS) * 2


def test_nobody_there():
    reply = ask("http://127.0.0.1:9")
    assert reply.outcome == "not connected"
    assert reply.ended_s >= reply.started_s


def test_a_killed_request_is_dropped(stub):
    with StreamingClient(stub.url, model="stub-endless") as client:
        reply = client.begin()
        greenlet = gevent.spawn(client.finish, reply, [], max_tokens=1, ignore_eos=True, headers={})
        gevent.sleep(0.1)
        greenlet.kill()
    assert reply.outcome == "dropped"
    assert 0 < reply.e2e_s < 1


def test_what_is_asked(stub):
    with StreamingClient(stub.url + "/", model="stub", api_key="k") as client:
        client.chat(
            [{"role": "user", "content": "a"}],
            max_tokens=2,
            ignore_eos=False,
            headers={"x-request-id": "mine"},
        )
    assert stub.read("bodies")[-1] == {
        "id": "mine",
        "model": "stub",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "temperature": 0.0,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
