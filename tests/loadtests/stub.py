"""A server with known delays: the truth that the load test's client is measured against.

    python stub.py [--first-ms 50] [--token-ms 10]

Prints its port. Each chunk of an answer is one event, cut in two at a place that moves through
it, also inside of UTF-8 characters. What it really did is on /log: for each `x-request-id` when
the request had come and when each token was sent, on CLOCK_MONOTONIC, which all processes of a
machine share. The model's name chooses what goes wrong: see `FAULTS`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import selectors
import signal
import socket
import time

FAULTS = ("stall", "silent", "error", "cut", "http-503", "no-text", "junk", "endless", "no-end")
MODELS = ("stub", *(f"stub-{fault}" for fault in FAULTS))
FIRST = {  # what the first token is, by the model's name
    "reasoning": {"reasoning": "hm "},
    "reasoning_content": {"reasoning_content": "hm "},
    "tools": {"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": ""}}]},
}
# 1, 2, 3 and 4 bytes in UTF-8; U+2028 ends a line for Python, not for an event.
WORDS = ("plain ", "naïve ", "東京\u2028", "🙂 ")
METRICS = """\
vllm:prompt_tokens_total{{engine="0"}} {prompt}
vllm:generation_tokens_total{{engine="0"}} {generated}
vllm:prefix_cache_queries_total{{engine="0"}} {prompt}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:external_prefix_cache_queries_total{{engine="0"}} {rest}
vllm:external_prefix_cache_hits_total{{engine="0"}} {external}
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
"""


class Stub:
    """What all connections share."""

    def __init__(self, first_s: float, token_s: float, metrics: bool) -> None:
        self.first_s, self.token_s, self.has_metrics = first_s, token_s, metrics
        self.log: dict[str, list[float]] = {}
        self.bodies: list[dict] = []
        self.prompt = self.generated = self.running = 0

    def metrics(self) -> str:
        prompt = self.prompt
        return METRICS.format(
            prompt=prompt,
            generated=self.generated,
            running=self.running,
            hits=prompt // 4,
            rest=prompt - prompt // 4,
            external=prompt // 2,
        )


def words(messages: list[dict]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def tokens(count: int, *, text: bool = False) -> list[tuple[bytes, bytes]]:
    """The events of an answer, each in two pieces, as HTTP chunks."""
    made = []
    for i in range(count):
        word = WORDS[i % len(WORDS)]
        body = {
            "choices": [{"index": 0, **({"text": word} if text else {"delta": {"content": word}})}]
        }
        data = json.dumps(body, ensure_ascii=False).encode()
        event = b": ping\r\n" * (i % 7 == 3) + b"data: " + data + (b"\r\n\r\n", b"\n\n")[i % 2]
        cut = 1 + (i * 13) % (len(event) - 1)
        made.append((chunked(event[:cut]), chunked(event[cut:])))
    return made


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**body) -> bytes:
    return chunked(b"data: " + json.dumps(body).encode() + b"\n\n")


TOKENS, TEXTS = tokens(1024), tokens(1024, text=True)
ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
DONE = chunked(b"data: [DONE]\n\n")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, with its own timers: no task is switched between a time and its write."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.buffer = stub, b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop = asyncio.get_running_loop()

    def connection_lost(self, error):
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data):
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        request, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        method, path, _ = request.split(" ")
        if method == "POST":
            self.answer(json.loads(rest[:length]), headers.get("x-request-id", ""))
        else:
            self.say(path)

    def say(self, path):
        stub = self.stub
        body = {
            "/health": lambda: "",
            "/log": lambda: json.dumps(stub.log),
            "/bodies": lambda: json.dumps(stub.bodies),
            "/v1/models": lambda: json.dumps({"data": [{"id": name} for name in MODELS]}),
        }
        if stub.has_metrics:
            body["/metrics"] = stub.metrics
        made = body.get(path, lambda: None)()
        status = "404 Not Found" if made is None else "200 OK"
        data = (made or "").encode()
        self.transport.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        self.transport.write(data)

    def answer(self, body, request_id):
        now, stub = time.monotonic(), self.stub
        self.sent = stub.log.setdefault(request_id, [])
        self.sent.append(now)
        stub.bodies = [*stub.bodies[-999:], {"id": request_id, **body}]
        self.fault = body["model"].partition("stub-")[2]
        if self.fault == "http-503":
            self.transport.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
            return
        if self.fault == "silent":
            return
        self.length = body["max_tokens"]
        self.text = "prompt" in body  # /v1/completions
        self.prompt = len(body["prompt"]) if self.text else words(body["messages"])
        stub.running += 1
        self.transport.write(HEAD if self.text else HEAD + ROLE)
        self.origin = now + stub.first_s
        self.timer = self.loop.call_at(self.origin, self.token, 0)

    def token(self, i):
        if self.transport.is_closing():
            return
        if i == 3 and self.fault in FAULTS and self.go_wrong():
            return
        if i == self.length and self.fault != "endless":
            self.end()
            return
        if self.fault in FIRST and i == 0:
            self.sent.append(time.monotonic())
            self.transport.write(event(choices=[{"index": 0, "delta": FIRST[self.fault]}]))
        elif self.fault != "no-text":
            first, second = (TEXTS if self.text else TOKENS)[i % len(TOKENS)]
            self.sent.append(time.monotonic())
            self.transport.write(first)
            self.transport.write(second)
        self.timer = self.loop.call_at(self.origin + (i + 1) * self.stub.token_s, self.token, i + 1)

    def go_wrong(self):
        if self.fault == "error":
            self.transport.write(event(error={"message": "out of memory"}) + b"0\r\n\r\n")
        elif self.fault == "junk":
            self.transport.write(chunked(b"data: {broken\n\n") + b"0\r\n\r\n")
        elif self.fault == "cut":
            self.transport.abort()
        elif self.fault == "no-end":
            self.transport.write(b"0\r\n\r\n")
        elif self.fault in ("endless", "no-text"):
            return False
        return True  # a stall says no more

    def end(self):
        stub = self.stub
        usage = {"prompt_tokens": self.prompt, "completion_tokens": self.length}
        self.transport.write(event(choices=[], usage=usage) + DONE + b"0\r\n\r\n")
        stub.prompt += self.prompt
        stub.generated += self.length
        stub.running -= 1


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=50)
    parser.add_argument("--token-ms", type=float, default=10)
    parser.add_argument("--no-metrics", action="store_true")
    args = parser.parse_args()
    stub = Stub(args.first_ms / 1e3, args.token_ms / 1e3, not args.no_metrics)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stub), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop.add_signal_handler(signal.SIGTERM, server.close)
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve_forever()


if __name__ == "__main__":
    gc.disable()  # its pauses would be ours
    # epoll counts in milliseconds: all tokens of one would come at once.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
