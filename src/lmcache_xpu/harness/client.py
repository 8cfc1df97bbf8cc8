"""A client of the OpenAI-style API that measures times, tokens, and the server's cache hits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lmcache_xpu.errors import EngineError

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
    """The server's cache counters, in tokens, since it started; `-` gives those of a span.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The model's name on the server."""
        if self._model is None:
            self._model = str(self._get("/v1/models").json()["data"][0]["id"])
        return self._model

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        ignore_eos: bool = True,
        seed: int = 0,
    ) -> Answer:
        """Return the greedy answer to a conversation, exactly `max_tokens` long if `ignore_eos`."""
        body = {"messages": list(messages), **self._sampling(max_tokens, ignore_eos, seed)}
        return self._stream("/v1/chat/completions", body)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = True,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return the greedy continuation of a text or of token ids; `options` join the request."""
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **self._sampling(max_tokens, ignore_eos, seed),
            **(options or {}),
        }
        return self._stream("/v1/completions", body)

    def counts(self) -> CacheCounts:
        """Return the server's cache counters, summed over its engines."""
        totals = dict.fromkeys(_SAMPLES.values(), 0.0)
        present = set()
        for family in text_string_to_metric_families(self._get("/metrics").text):
            for sample in family.samples:
                if name := _SAMPLES.get(sample.name):
                    totals[name] += sample.value
                    present.add(sample.name)
        if absent := sorted(_SAMPLES.keys() - present):
            raise EngineError(
                f"no {', '.join(absent)} on {self._http.base_url}/metrics",
                "the metrics of a vLLM server",
                "Start it without --disable-log-stats.",
            )
        return CacheCounts(**{name: int(value) for name, value in totals.items()})

    def _sampling(self, max_tokens: int, ignore_eos: bool, seed: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise self._failure(f"{type(error).__name__} ({error})") from error

    def _stream(self, path: str, body: dict[str, Any]) -> Answer:
        begin = time.perf_counter()
        stream = _Stream(begin)
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    refusal = response.read().decode(errors="replace")
                    raise self._failure(f"HTTP {response.status_code}: {refusal[:500]}")
                for data in sse_data(response.iter_bytes()):
                    now = time.perf_counter()
                    if data == "[DONE]":
                        stream.ended = True
                        break
                    event = json.loads(data)
                    if "error" in event:
                        raise self._failure(f"an error in the stream: {event['error']}")
                    stream.add(event, now)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise self._failure(f"{type(error).__name__} ({error})") from error
        total_s = time.perf_counter() - begin
        if stream.ttft_s is None or not (stream.ended and stream.usage):
            raise self._failure(f"a stream without {stream.gaps}")
        return Answer(
            text="".join(stream.text),
            token_ids=tuple(stream.token_ids),
            ttft_s=stream.ttft_s,
            total_s=total_s,
            prompt_tokens=stream.usage["prompt_tokens"],
            completion_tokens=stream.usage["completion_tokens"],
        )

    def _failure(self, event: str) -> EngineError:
        return EngineError(
            f"{event} from {self._http.base_url}",
            "a whole answer",
            "The server's log has the cause.",
        )


@dataclass(slots=True)
class _Stream:
    """An answer while it comes in.

    Args:
        begin: the time of sending the request, as `time.perf_counter` has it.
    """

    begin: float
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    ttft_s: float | None = None
    ended: bool = False

    def add(self, event: dict[str, Any], now: float) -> None:
        """Take in an event that came at this time."""
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            # The chunk that only names the role is no token.
            if piece := _text(choice):
                self.ttft_s = now - self.begin if self.ttft_s is None else self.ttft_s
                self.text.append(piece)
            self.token_ids += choice.get("token_ids") or []

    @property
    def gaps(self) -> str:
        """The parts of a whole answer that did not come."""
        parts = {"an end": self.ended, "text": self.ttft_s is not None, "usage": bool(self.usage)}
        return " and ".join(part for part, has_come in parts.items() if not has_come)


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of one chunk; a reasoning model's thoughts are tokens, too."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    names = ("reasoning_content", "reasoning", "content")
    return str(next((delta[name] for name in names if delta.get(name)), ""))


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the data of each server-sent event, whatever way the network cut the bytes.

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
