"""The measuring client against a server that cuts its bytes where it hurts."""

from __future__ import annotations

import http.server
import json
import threading
import time
from contextlib import contextmanager

import pytest

from lmcache_xpu.errors import EngineError
from lmcache_xpu.harness.client import CacheCounts, Client, sse_data

PAUSE_S = 0.25


def event(**body):
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def chunk(content=None, token_ids=None, **delta):
    choice = {"index": 0, "delta": {**delta}}
    if content is not None:
        choice["delta"]["content"] = content
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return event(choices=[choice])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
DONE = b"data: [DONE]\n\n"
ROLE = chunk("", role="assistant")
METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 24.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.024e+03
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 256.0
# TYPE vllm:prefix_cache_hits_created gauge
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 768.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 512.0
"""


@contextmanager
def serving(pieces=(), *, status=200, metrics=METRICS, cut=False):
    """A server that sends `pieces` one by one; a number among them is a pause in seconds."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, body, kind="application/json"):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            requests.append((self.path, dict(self.headers), None))
            if self.path == "/metrics":
                self.reply(metrics.encode(), "text/plain")
            else:
                self.reply(json.dumps({"data": [{"id": "served-name"}]}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                if isinstance(piece, float):
                    time.sleep(piece)
                    continue
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
            if cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat(pieces, **options):
    with serving(pieces, **options) as (url, _), Client(url, model="m") as client:
        return client.chat([{"role": "user", "content": "?"}], max_tokens=3)


def test_time_to_first_token_is_that_of_the_first_text():
    """Not of the headers, not of the role, not of an empty chunk."""
    answer = chat(
        [ROLE, chunk(""), PAUSE_S, chunk("a", [1]), PAUSE_S, chunk("b", [2, 3]), USAGE, DONE]
    )
    assert PAUSE_S <= answer.ttft_s < 2 * PAUSE_S
    assert (answer.text, answer.token_ids) == ("ab", (1, 2, 3))
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_events_survive_any_cut(size):
    # U+2028 and \x85 end lines for Python's splitlines, and are legal inside JSON's strings.
    words = ["naïve ", "東京\u2028", "🙂\x85", "\r\n"]
    stream = b": ping\r\n\r\n" + ROLE + b"".join(chunk(word) for word in words) + USAGE + DONE
    stream = stream.replace(b"\n\n", b"\r\n\r\n")
    cuts = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert chat(cuts).text == "".join(words)


def test_events_may_share_a_chunk():
    assert chat([ROLE + chunk("a") + chunk("b") + USAGE + DONE]).text == "ab"


def test_fields_that_are_no_data_are_skipped():
    stream = [b"event: x\nid: 1\ndata: a\n\n", b"retry: 5\n\n", b"data:c\n\n"]
    assert list(sse_data(stream)) == ["a", "c"]


@pytest.mark.parametrize(
    ("pieces", "options", "says"),
    [
        ([event(error={"message": "out of memory"})], {}, "an error in the stream: .*out of mem"),
        ([b'{"error": "no such model"}'], {"status": 404}, "HTTP 404: .*no such model"),
        ([ROLE, chunk("a")], {}, "a stream without an end"),
        ([ROLE, USAGE, DONE], {}, "a stream without text"),
        ([ROLE, chunk("a"), DONE], {}, "a stream without usage"),
        ([ROLE, b"data: {broken\n\n"], {}, "JSONDecodeError"),
        ([ROLE, chunk("a")], {"cut": True}, "RemoteProtocolError"),
    ],
)
def test_a_broken_answer_is_an_error_and_never_a_figure(pieces, options, says):
    with pytest.raises(EngineError, match=says):
        chat(pieces, **options)


def test_a_server_that_is_away_is_an_error():
    with Client("http://127.0.0.1:9", model="m") as client:
        with pytest.raises(EngineError, match="ConnectError"):
            client.counts()
        with pytest.raises(EngineError, match="ConnectError"):
            client.complete("a", max_tokens=1)


def test_what_is_asked():
    pieces = [event(choices=[{"text": "x", "token_ids": [5]}]), USAGE, DONE]
    with serving(pieces) as (url, requests), Client(url, api_key="k") as client:
        answer = client.complete([1, 2, 3], max_tokens=9, options={"seed": 4})
    assert (answer.text, answer.token_ids) == ("x", (5,))
    assert [path for path, *_ in requests] == ["/v1/models", "/v1/completions"]
    _, headers, body = requests[-1]
    assert headers["Authorization"] == "Bearer k"
    assert body == {
        "model": "served-name",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 4,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_asking_the_server_for_the_models_name_is_not_timed():
    pieces = [chunk("a"), USAGE, DONE]
    with serving(pieces) as (url, _), Client(url) as client:
        real = client._get

        def slow(path):
            time.sleep(PAUSE_S)
            return real(path)

        client._get = slow
        assert client.chat([], max_tokens=1).ttft_s < PAUSE_S


def test_counts_are_summed_over_engines_and_subtracted():
    later = METRICS.replace(" 512.0", " 612.0").replace(" 1000.0", " 1100.0")
    with serving() as (url, _), Client(url) as client:
        before = client.counts()
    assert before == CacheCounts(
        prompt=1024,
        prefix_hits=256,
        external_hits=512,
    )
    with serving(metrics=later) as (url, _), Client(url) as client:
        span = client.counts() - before
    assert span == CacheCounts(prompt=100, prefix_hits=0, external_hits=100)


def test_counters_that_are_missing_are_not_zero():
    without = "\n".join(line for line in METRICS.splitlines() if "external" not in line) + "\n"
    says = pytest.raises(EngineError, match="no vllm:external_prefix_cache_hits_total on")
    with serving(metrics=without) as (url, _), Client(url) as client, says:
        client.counts()


def test_the_names_are_those_that_vllm_registers():
    """vLLM's source is the contract; its names have changed before."""
    import importlib.util
    from pathlib import Path

    from lmcache_xpu.harness.client import _SAMPLES

    root = Path(importlib.util.find_spec("vllm").origin).parent
    source = (root / "v1/metrics/loggers.py").read_text()
    for name in _SAMPLES:
        assert f'name="{name.removesuffix("_total")}"' in source


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("node:8000", "http://node:8000"),
        ("node:8000/v1", "http://node:8000"),
        ("https://node/metrics", "https://node"),
    ],
)
def test_an_address_without_a_scheme_is_that_of_a_plain_server(url, asked):
    with Client(url) as client:
        assert client.url == asked
