"""One streamed chat completion, timed. Runs on gevent and needs no patching."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self
from urllib.parse import urlsplit

import gevent
import orjson
from geventhttpclient.client import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse

from lmcache_xpu.harness.client import sse_data

__all__ = ["DROPPED", "OK", "Reply", "StreamingClient"]

OK = "ok"
DROPPED = "dropped"  # unfinished when the run ended; neither an answer nor a failure


@dataclass(slots=True, kw_only=True)
class Reply:
    """What came back, and when. Times are seconds on `time.perf_counter`'s clock.

    Args:
        started_s: when the request was sent.
        ended_s: when the stream ended or failed.
        arrivals_s: of each chunk with content (text, reasoning, or a tool call).
        text: the answer; thoughts and tool calls are no part of it.
        outcome: `OK`, `DROPPED`, or the kind of failure.
        detail: of a failure, for people.
        prompt_tokens: as the server counts; None when it doesn't say.
        completion_tokens: as the server counts; None when it doesn't say.
        cached_tokens: of the prompt, found in any cache; None when it doesn't say.
    """

    started_s: float
    ended_s: float
    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    outcome: str = DROPPED
    detail: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first content."""
        return self.arrivals_s[0] - self.started_s if self.arrivals_s else None

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one, by the server's count of tokens.

        Chunks can't be counted for that: one may hold several tokens.
        """
        if not self.arrivals_s or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between chunks with content, each of which may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]


class _StreamError(Exception):
    """The server answered, but with less than a whole answer."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class _Silence:
    """Raises its `timeout` when nothing has come for so long, or a hundredth longer.

    A new timer for every token would cost as much as all else that is done with it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        self._listen(time.perf_counter())

    def __exit__(self, *_: object) -> None:
        self.timeout.close()

    def broken(self) -> None:
        """Something came."""
        now = time.perf_counter()
        if now - self._since_s > self._limit_s / 100:
            self.timeout.close()
            self._listen(now)

    def _listen(self, now: float) -> None:
        self._since_s = now
        self.timeout = gevent.Timeout.start_new(self._limit_s * 1.01)


class StreamingClient:
    """One user's connection to a server; one request at a time.

    Args:
        url: of the server, without /v1.
        model: name to ask for.
        api_key: sent when there is one.
        connect_s: longest wait for a connection.
        silence_s: longest wait for the next byte.
        request_s: longest request in all.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        connect_s: float = 10.0,
        silence_s: float = 60.0,
        request_s: float = 300.0,
    ) -> None:
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._model = model
        self._path = urlsplit(url).path.rstrip("/") + "/v1/"
        self._request_s, self._silence_s = request_s, silence_s
        self._http = HTTPClient.from_url(
            url, headers=headers, connection_timeout=connect_s, network_timeout=None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        ignore_eos: bool,
        headers: Mapping[str, str],
    ) -> Reply:
        """Ask, and read the greedy answer to its end.

        It always returns, within `request_s`: a failure is a `Reply`, too. The one exception is
        that its greenlet is killed; then `outcome` would be `DROPPED`, which `begin` is for.
        """
        reply = self.begin()
        self.finish(reply, messages, max_tokens=max_tokens, ignore_eos=ignore_eos, headers=headers)
        return reply

    def begin(self) -> Reply:
        """A reply that hasn't come yet; hand it to `finish`."""
        now = time.perf_counter()
        return Reply(started_s=now, ended_s=now)

    def finish(
        self,
        reply: Reply,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        ignore_eos: bool,
        headers: Mapping[str, str],
        tokens: Sequence[int] = (),
    ) -> None:
        """What `chat` does, into a reply that the caller holds even if this greenlet is killed.

        With `tokens` these are the prompt, and there are no messages.
        """
        path = "completions" if tokens else "chat/completions"
        body = orjson.dumps(
            {
                "model": self._model,
                **({"prompt": tokens} if tokens else {"messages": messages}),
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        deadline, silence = gevent.Timeout(self._request_s), _Silence(self._silence_s)
        reply.started_s = time.perf_counter()
        try:
            with deadline, silence:
                self._exchange(reply, path, body, headers, silence)
            outcome, detail = OK, ""
        except gevent.Timeout as timeout:
            if timeout is deadline:
                outcome, detail = "deadline", f"not finished after {self._request_s:g} s"
            elif timeout is silence.timeout:
                outcome, detail = "stalled", f"nothing came for {self._silence_s:g} s"
            else:
                raise
        except _StreamError as failure:
            outcome, detail = failure.kind, failure.detail
        except TimeoutError as error:  # before OSError, which it is
            outcome, detail = "stalled", str(error)
        except (HTTPParseError, ConnectionResetError, BrokenPipeError) as error:
            outcome, detail = "broken off", str(error)
        except OSError as error:
            outcome, detail = "not connected", str(error)
        finally:
            reply.ended_s = time.perf_counter()
        reply.outcome, reply.detail = outcome, detail[:300]

    def _exchange(
        self, reply: Reply, path: str, body: bytes, headers: Mapping[str, str], silence: _Silence
    ) -> None:
        response = self._http.request("POST", self._path + path, body=body, headers=dict(headers))
        try:
            if response.status_code != 200:
                refusal = response.read().decode(errors="replace")
                raise _StreamError(f"HTTP {response.status_code}", refusal)
            self._read(reply, response, silence)
        except BaseException:
            response.release()  # closes it: what is left of a broken stream is nobody's answer
            raise

    def _read(self, reply: Reply, response: HTTPSocketPoolResponse, silence: _Silence) -> None:
        text: list[str] = []
        ended = False
        for data in sse_data(_arriving(response, silence)):
            now = time.perf_counter()
            if ended := data == "[DONE]":
                response.read()  # the end of the body, so that the connection can be used again
                break
            event = _event(data)
            if usage := event.get("usage"):
                _count(reply, usage)
            for choice in event.get("choices", ()):
                piece, is_token = _content(choice.get("delta") or {"content": choice.get("text")})
                if is_token:
                    reply.arrivals_s.append(now)
                text.append(piece)
        reply.text = "".join(text)
        if not ended:
            raise _StreamError("broken off", "the stream ended without [DONE]")
        if not reply.arrivals_s:
            raise _StreamError("no content", "the stream ended without any text")


def _arriving(response: HTTPSocketPoolResponse, silence: _Silence) -> Iterator[bytes]:
    """The body's bytes as they come, each of which begins the silence anew.

    Not the response's own `read`, which waits for full blocks, nor `readline`, nor the socket's
    timeout: they cost more than all else that a stream does.
    """
    body, sock = response._body_buffer, response._sock
    while True:
        if body:
            yield bytes(body)
            body.clear()
        if sock is None or response.message_complete:
            return
        response.feed(sock.recv(response.block_size))
        silence.broken()


def _event(data: str) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _StreamError("bad event", f"{error}: {data}") from error
    if not isinstance(event, dict):
        raise _StreamError("bad event", data)
    if "error" in event:
        raise _StreamError("error in stream", str(event["error"]))
    return event


def _count(reply: Reply, usage: Mapping[str, Any]) -> None:
    reply.prompt_tokens = usage.get("prompt_tokens")
    reply.completion_tokens = usage.get("completion_tokens")
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _content(delta: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a chunk's text, and whether it has any content: the role without more is none."""
    content = delta.get("content") or ""
    thought = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    return content, bool(content or thought)
