"""One running engine, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_xpu.harness.client import Answer, CacheCounts, Client

CHUNK = 256
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading of /metrics: sample name and labels -> value."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples of this name with at least these labels."""
        return sum(
            value
            for sample, sample_labels, value in self.samples
            if sample == name and labels.items() <= sample_labels.items()
        )

    def flow(self, what: str, direction: str, tier: str) -> float:
        """One of this package's counters."""
        return self.sum(f"lmcache_xpu_{what}_total", direction=direction, tier=tier)


class Runner(Protocol):
    """Whoever started an engine, and can end it.

    Attributes:
        hooks: directory through which faults are planted; see hooks/sitecustomize.py.
        group: of the engine's processes, where they are this machine's own.
    """

    hooks: Path
    group: int | None

    def log(self) -> str:
        """What the engine has written so far."""

    def kill(self) -> None:
        """SIGKILL to all of the engine's processes at once."""

    def stop(self) -> None:
        """SIGTERM to the server, and wait until nothing of it runs."""


class Engine:
    """A running engine; ended by the stack that made it.

    Args:
        url: where it answers.
        api_key: that it wants.
        runner: None where someone else has started it; tests that need more are skipped.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, runner: Runner | None = None
    ) -> None:
        self.url = url
        self.client = Client(url, api_key=api_key, timeout_s=120)
        self._runner = runner
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)

    def close(self) -> None:
        """Let go of the connections."""
        self.client.__exit__(None, None, None)
        self._http.close()

    @property
    def runner(self) -> Runner:
        """Whoever started it; skips the test where that is someone else."""
        if self._runner is None:
            pytest.skip("needs an engine that these tests have started")
        return self._runner

    @property
    def small(self) -> bool:
        """Whether it has the settings of these tests, tiers that a few prompts fill among them."""
        return self._runner is not None

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        """The greedy continuation of token ids."""
        return self.client.complete(tokens, max_tokens=max_tokens, options=options)

    def recompute(self, tokens: Sequence[int], max_tokens: int = 8, again: int = 0) -> Answer:
        """The same without any cache: a salt of its own finds nothing."""
        salt = f"recompute {hash(tuple(tokens))} {again}"
        return self.ask(tokens, max_tokens, cache_salt=salt)

    def likeliest(self, tokens: Sequence[int]) -> dict[int, float]:
        """The five likeliest next tokens and their log probabilities, without any cache."""
        body = {
            "model": self.client.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"likeliest {hash(tuple(tokens))}",
        }
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        (logprobs,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {int(name.removeprefix("token_id:")): value for name, value in logprobs.items()}

    @contextlib.contextmanager
    def answering(
        self, tokens: Sequence[int], max_tokens: int = 512, **options: Any
    ) -> Iterator[httpx.Response]:
        """An answer that comes, or is waited for; the connection is closed at the end."""
        body = {"model": self.client.model, "prompt": tokens, "max_tokens": max_tokens, **options}
        body |= {"stream": True, "ignore_eos": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            yield answer

    def counts(self) -> CacheCounts:
        """vLLM's own counters of cache hits."""
        return self.client.counts()

    def reaches(self, name: str, value: int, seconds: float) -> int:
        """The most that the gauge was seen at, up to the value, which ends the wait."""
        deadline = time.monotonic() + seconds
        most = 0
        while most < value and time.monotonic() < deadline:
            most = max(most, int(self.metrics().sum(name)))
            time.sleep(0.05)
        return min(most, value)

    def metrics(self) -> Metrics:
        """All of /metrics."""
        page = self._http.get("/metrics").raise_for_status().text
        return Metrics(
            tuple(
                (sample.name, sample.labels, sample.value)
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            )
        )

    def status(self, path: str, **body: Any) -> int:
        """The status code of a request without a key."""
        return self._http.post(path, json=body, headers={"Authorization": ""}).status_code

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that what is found comes from LMCache."""
        for _ in range(50):  # refused while a block is in use
            response = self._http.post("/reset_prefix_cache")
            if response.status_code == httpx.codes.NOT_FOUND:
                pytest.skip("this engine can't empty its prefix cache (VLLM_SERVER_DEV_MODE)")
            if response.is_success:
                return
            time.sleep(0.1)
        pytest.fail(f"prefix cache not reset: {response.status_code} {response.text}")

    def reset(self) -> None:
        """Let the engine find nothing any more that it or others have stored."""
        for _ in range(50):  # vLLM's own part says no while a block is in use
            response = self._http.post("/reset_prefix_cache?reset_external=true")
            if response.raise_for_status().json()["success"]:
                return
            time.sleep(0.1)
        pytest.fail(f"not reset: {response.text}")

    def alive(self) -> bool:
        """Whether the server and its engine answer."""
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False

    def plant(self, point: str, layer: int = 0, *, kill: bool = False) -> None:
        """Let the next call at this point raise, or kill its process."""
        fault = {"point": point, "layer": layer, "kill": kill}
        (self.runner.hooks / "fault.json").write_text(json.dumps(fault))

    def planted(self) -> bool:
        """Whether a fault waits for its call; takes it back."""
        file = self.runner.hooks / "fault.json"
        waiting = file.exists()
        file.unlink(missing_ok=True)
        return waiting

    def inside(self, question: str) -> Any:
        """What the worker answers; hooks/inside.py has the questions."""
        answer = self.runner.hooks / "answer.json"
        answer.unlink(missing_ok=True)
        (self.runner.hooks / question).touch()
        deadline = time.monotonic() + 20
        while not answer.exists():
            if time.monotonic() > deadline:
                pytest.fail("the worker does not answer")
            time.sleep(0.02)
        return json.loads(answer.read_text())

    def settle(self) -> None:
        """Wait until what is queued for the disk is there."""
        if self._runner is not None:
            assert self.inside("settled"), "writes to the disk do not end"
            return
        written = -1.0
        while written != (now := self.metrics().flow("bytes", "store", "disk")):
            written = now
            time.sleep(0.3)
