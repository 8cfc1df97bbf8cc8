"""A client of a vLLM server: measures times and tokens, and reads its metrics and cache hits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lmcache_xpu.errors import EngineError

Message = Mapping[str, str]  # {"role": ..., "content": ...}
ADDRESS = "the address of an engine, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer."""

    text: str  # the whole text
    token_ids: tuple[int, ...]  # its tokens; empty when the server doesn't send them
    ttft_s: float  # seconds from sending the request to the first chunk with text
    prompt_tokens: int  # length of the prompt, as the server counts
    completion_tokens: int  # length of the answer, as the server counts


class CacheCounts(NamedTuple):
    """The server's cache counters, in tokens, since it started; `-` gives a span's."""

    prompt: int  # prompt tokens of finished prefills
    prefix_hits: int  # tokens that were in the engine's own prefix cache
    external_hits: int  # tokens that were in LMCache

    def __sub__(self, earlier: CacheCounts) -> CacheCounts:
        return CacheCounts(*(now - before for now, before in zip(self, earlier, strict=True)))


# Samples of these counts on vLLM's /metrics; counters end in _total there.
_SAMPLES = (
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
)


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of /metrics at one moment."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Page:
        """Read a page as Prometheus does; ValueError if it is none."""
        families = text_string_to_metric_families(text)
        return cls(tuple(sample for family in families for sample in family.samples))

    def has(self, prefix: str) -> bool:
        """Whether a metric's name begins so."""
        return any(sample.name.startswith(prefix) for sample in self.samples)

    def sum(self, name: str, **labels: str) -> float:
        """Add up the values of all engines and processes; 0.0 if there are none."""
        return sum(sample.value for sample in self.of(name, **labels))

    def of(self, name: str, **labels: str) -> Iterator[Sample]:
        """Yield the samples of a metric that have these labels."""
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


class Client:
    """A connection to one server; use it as a context manager.

    A `url` without a scheme is one of http://, and an ending such as /v1 or /metrics is left out.
    Without a `model` the server is asked for its first one. It may be silent for `timeout_s`
    seconds. `trust_env`: the environment may name a proxy, which would be timed, too.

    Every method raises EngineError when the server is away, refuses, or breaks off.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        trust_env: bool = False,
    ) -> None:
        if "://" not in url:
            url = f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            trust_env=trust_env,
            follow_redirects=True,
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
            [self._model, *_] = self.models() or [""]  # which the server refuses
        return self._model

    def models(self) -> list[str]:
        """Return the names of the server's models; none where it wants another key."""
        response = self._get("/v1/models")
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return []

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

    def page(self) -> Page:
        """Return the metrics of a vLLM server."""
        response = self._get("/metrics")
        try:
            page = Page.parse(response.text if response.is_success else "")
        except ValueError:
            page = Page(())
        if not page.has("vllm:"):
            raise EngineError(
                f"{self.url}/metrics, which has no metrics of vLLM ({response.status_code})",
                ADDRESS,
                "A router has a page of its own: name the engine behind it."
                if response.status_code not in (401, 403)
                else "Put the key into LMCACHE_XPU_API_KEY.",
            )
        return page

    def counts(self) -> CacheCounts:
        """Return the server's cache counters, summed over its engines."""
        page = self.page()
        if absent := sorted(name for name in _SAMPLES if not any(page.of(name))):
            raise EngineError(
                f"no {', '.join(absent)} on {self.url}/metrics",
                "the metrics of a vLLM server",
                "Start it without --disable-log-stats.",
            )
        return CacheCounts(*(int(page.sum(name)) for name in _SAMPLES))

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(self.url + path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from error

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
        begin = time.perf_counter()
        try:
            for event in self._events(path, request):
                now = time.perf_counter()
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    # The chunk that only names the role is no token.
                    if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                        ttft_s = now - begin if ttft_s is None else ttft_s
                        text.append(piece)
                    token_ids += choice.get("token_ids") or []
        except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
            raise self._no_answer(error) from error
        if ttft_s is None or not usage:
            raise self._failure(f"a stream without {'usage' if ttft_s else 'text'}")
        return Answer(
            text="".join(text),
            token_ids=tuple(token_ids),
            ttft_s=ttft_s,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )

    def _events(self, path: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer, which has an end."""
        with self._http.stream("POST", self.url + path, json=request) as response:
            if response.is_error:
                refusal = response.read().decode(errors="replace")
                raise self._failure(f"HTTP {response.status_code}: {refusal[:500]}")
            for data in sse_data(response.iter_bytes()):
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise self._failure(f"an error in the stream: {event['error']}")
                yield event
        raise self._failure("a stream without an end")

    def _failure(self, event: str) -> EngineError:
        return EngineError(
            f"{event} from {self.url}", "a whole answer", "The server's log has the cause."
        )

    def _no_answer(self, error: Exception) -> EngineError:
        cause = f"{type(error).__name__}: {error}"
        fix = "Is it running, and is that its port?"
        if "CERTIFICATE" in cause or "SSL" in cause:
            fix = "Name its certificate's authority in SSL_CERT_FILE, or check http and https."
        return EngineError(f"no answer from {self.url} ({cause})", ADDRESS, fix)


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the data of each server-sent event, a line, however the network cut the bytes.

    Not httpx's iter_lines: it also splits where a text has U+2028 or \x85, and JSON may.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode().strip()
