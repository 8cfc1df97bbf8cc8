"""A client of the OpenAI-style API that measures times, tokens, and the server's cache hits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import httpx

from lmcache_xpu.errors import EngineError
from lmcache_xpu.harness.server import Page

__all__ = ["Answer", "CacheCounts", "Client", "Message", "sse_data"]

Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer.

    Args:
        text: the whole text.
        token_ids: its tokens; empty when the server doesn't send them.
        ttft_s: seconds from sending the request to the first chunk with text.
        total_s: seconds to the end of the stream.
        prompt_tokens: length of the prompt, as the server counts.
        completion_tokens: length of the answer, as the server counts.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """The server's cache counters, in tokens, since it started; `-` gives a span's.

    Args:
        prompt: prompt tokens of finished prefills.
        prefix_queries: tokens looked up in the engine's own prefix cache.
        prefix_hits: tokens that were there.
        external_queries: tokens then looked up in LMCache.
        external_hits: tokens that were there.
    """

    prompt: int
    prefix_queries: int
    prefix_hits: int
    external_queries: int
    external_hits: int

    def __sub__(self, earlier: CacheCounts) -> CacheCounts:
        return CacheCounts(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


# Samples on vLLM's /metrics; counters end in _total there.
_SAMPLES = {
    "vllm:prompt_tokens_total": "prompt",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
}


class Client:
    """A connection to one server; use it as a context manager.

    Args:
        url: the server's, without /v1.
        model: name to ask for; None asks the server for its first one.
        api_key: sent to /v1 when there is one.
        timeout_s: longest silence of the server, seconds.

    Raises:
        EngineError: from every method, when the server is away, refuses, or breaks off.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            trust_env=False,  # no proxy between us and the engine that is to be timed
        )
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The model's name on the server."""
        if self._model is None:
            self._model = str(self._get("/v1/models").json()["data"][0]["id"])
        return self._model

    def chat(self, messages: Sequence[Message], *, max_tokens: int) -> Answer:
        """Return the greedy answer to a conversation, exactly `max_tokens` long."""
        return self._stream("/v1/chat/completions", max_tokens, {"messages": list(messages)})

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        options: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return the greedy continuation of a text or of token ids; `options` join the request."""
        words = prompt if isinstance(prompt, str) else list(prompt)
        return self._stream("/v1/completions", max_tokens, {"prompt": words, **(options or {})})

    def counts(self) -> CacheCounts:
        """Return the server's cache counters, summed over its engines."""
        page = Page.parse(self._get("/metrics").text)
        if absent := sorted(name for name in _SAMPLES if not any(page.of(name))):
            raise EngineError(
                f"no {', '.join(absent)} on {self._http.base_url}/metrics",
                "the metrics of a vLLM server",
                "Start it without --disable-log-stats.",
            )
        return CacheCounts(**{field: int(page.sum(name)) for name, field in _SAMPLES.items()})

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise self._failure(f"{type(error).__name__} ({error})") from error

    def _stream(self, path: str, max_tokens: int, body: Mapping[str, Any]) -> Answer:
        request = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        text: list[str] = []
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        ttft_s: float | None = None
        ended = False
        begin = time.perf_counter()
        try:
            for event in self._events(path, request):
                now = time.perf_counter()
                if event is None:
                    ended = True
                    break
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    # The chunk that only names the role is no token.
                    if piece := _text(choice):
                        ttft_s = now - begin if ttft_s is None else ttft_s
                        text.append(piece)
                    token_ids += choice.get("token_ids") or []
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise self._failure(f"{type(error).__name__} ({error})") from error
        total_s = time.perf_counter() - begin
        if ttft_s is None or not (ended and usage):
            parts = {"an end": ended, "text": ttft_s is not None, "usage": bool(usage)}
            gaps = " and ".join(part for part, has_come in parts.items() if not has_come)
            raise self._failure(f"a stream without {gaps}")
        return Answer(
            text="".join(text),
            token_ids=tuple(token_ids),
            ttft_s=ttft_s,
            total_s=total_s,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )

    def _events(self, path: str, request: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Yield the events of a streamed answer; None at its end."""
        with self._http.stream("POST", path, json=request) as response:
            if response.is_error:
                refusal = response.read().decode(errors="replace")
                raise self._failure(f"HTTP {response.status_code}: {refusal[:500]}")
            for data in sse_data(response.iter_bytes()):
                event = None if data == "[DONE]" else json.loads(data)
                if event and "error" in event:
                    raise self._failure(f"an error in the stream: {event['error']}")
                yield event

    def _failure(self, event: str) -> EngineError:
        return EngineError(
            f"{event} from {self._http.base_url}",
            "a whole answer",
            "The server's log has the cause.",
        )


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of one chunk; a reasoning model's thoughts are tokens, too."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    names = ("reasoning_content", "reasoning", "content")
    return str(next((delta[name] for name in names if delta.get(name)), ""))


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the data of each server-sent event, however the network cut the bytes.

    Not httpx's iter_lines: it also splits where a text has U+2028 or \x85, and JSON may.
    """
    rest = b""
    data: list[bytes] = []
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").removesuffix(b"\r"))
            elif data and line in (b"", b"\r"):
                yield b"\n".join(data).decode()
                data = []
