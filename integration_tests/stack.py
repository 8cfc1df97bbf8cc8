"""The three ways to have an engine to test: processes here, the compose stack, or a URL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_xpu.demo.client import Answer, CacheCounts, Client
from lmcache_xpu.demo.engine import EngineProcess, free_port
from lmcache_xpu.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parent.parent
HOOKS = Path(__file__).parent / "hooks"
CHUNK = 256
MIB = 2**20
# Of demo.model.EXACT in float32: 4 KiB per token, 1 MiB per chunk. All tiers are small, so that
# a few prompts evict: 24 blocks short of 4 prompts, 24 chunks, 64 chunks.
SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 4096,
    "block_tokens": 128,
    "max_num_batched_tokens": 1024,
    "kv_cache_gib": 48 / 1024,
    "cpu_gib": 24 / 1024,
    "enforce_eager": True,
    "served_model_name": "exact",
}


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading of /metrics: sample name and labels -> value."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples of this name with at least these labels."""
        return sum(
            value
            for sample, given, value in self.samples
            if sample == name and labels.items() <= given.items()
        )

    def flow(self, what: str, direction: str, tier: str) -> float:
        """One of this package's counters."""
        return self.sum(f"lmcache_xpu_{what}_total", direction=direction, tier=tier)


class Engine:
    """A running engine and what tests ask of it; ended by the stack that made it.

    Args:
        url: where it answers.
        api_key: that it wants.
        process: where the stack is of processes here.
        hooks: directory through which faults are planted; see hooks/sitecustomize.py.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        process: EngineProcess | None = None,
        hooks: Path | None = None,
    ) -> None:
        self.url = url
        self.client = Client(url, api_key=api_key, timeout_s=120)
        self.process = process
        self._hooks = hooks
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def close(self) -> None:
        """Let go of the connections."""
        self.client.__exit__(None, None, None)
        self._http.close()

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        """The greedy continuation of token ids."""
        return self.client.complete(tokens, max_tokens=max_tokens, options=options)

    def counts(self) -> CacheCounts:
        """vLLM's own counters of cache hits."""
        return self.client.counts()

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

    def alive(self) -> bool:
        """Whether the server and its engine answer."""
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False

    def plant(self, point: str, layer: int = 0, *, kill: bool = False) -> None:
        """Let the next call at this point raise, or kill its process."""
        fault = {"point": point, "layer": layer, "kill": kill}
        (self._own_hooks() / "fault.json").write_text(json.dumps(fault))

    def planted(self) -> bool:
        """Whether a fault waits for its call; takes it back."""
        file = self._own_hooks() / "fault.json"
        waiting = file.exists()
        file.unlink(missing_ok=True)
        return waiting

    def look(self) -> dict[str, Any]:
        """Inside the worker: references, pins, memory, files."""
        seen = self._own_hooks() / "seen.json"
        seen.unlink(missing_ok=True)
        (self._own_hooks() / "look").touch()
        deadline = time.monotonic() + 20
        while not seen.exists():
            if time.monotonic() > deadline:
                pytest.fail("the worker does not answer")
            time.sleep(0.05)
        return json.loads(seen.read_text())

    def log(self) -> str:
        """What the engine has written so far."""
        return self._own_process().log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to all of the engine's processes at once."""
        process = self._own_process()
        if process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stop()

    def settle(self) -> None:
        """Wait until what is queued for the disk is there."""
        written = -1.0
        while written != (now := self.metrics().flow("bytes", "store", "disk")):
            written = now
            time.sleep(0.3)

    def _own_process(self) -> EngineProcess:
        if self.process is None:
            pytest.skip("needs an engine that runs as a process here (--stack processes)")
        return self.process

    def _own_hooks(self) -> Path:
        if self._hooks is None:
            pytest.skip("needs hooks in the engine (--stack processes)")
        return self._hooks


class Processes:
    """Engines as processes on this machine, with hooks inside."""

    def __init__(self, work: Path, model: Path, broken: str = "") -> None:
        self.work = work
        self.model = model
        self._broken = broken  # a part to take away, see hooks
        self._count = 0

    @contextlib.contextmanager
    def start(self, **changes: Any) -> Iterator[Engine]:
        """An engine with the small settings, changed; `disk_path` may be any directory."""
        changes.pop("own", None)
        self._count += 1
        hooks = self.work / f"hooks-{self._count}"
        hooks.mkdir()
        changes = {"model": str(self.model), "port": free_port(), **changes}
        settings = Settings.load({**SMALL, **changes})
        env = {
            "PYTHONPATH": str(HOOKS),
            "HOOKS_DIRECTORY": str(hooks),
            "HOOKS_BREAK": self._broken,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
        }
        log = self.work / f"engine-{self._count}.log"
        key = settings.api_key.get_secret_value() if settings.api_key else None
        with EngineProcess(settings, log, env=env) as process:
            engine = Engine(process.url, api_key=key, process=process, hooks=hooks)
            with contextlib.closing(engine):
                yield engine


class Compose:
    """The compose stack; one engine at a time."""

    @contextlib.contextmanager
    def start(self, **changes: Any) -> Iterator[Engine]:
        """The stack with the small settings, changed, as variables."""
        values = {**SMALL, **changes, "port": free_port()}
        for name in ("own", "disk_path"):  # the stack has a volume of its own
            values.pop(name, None)
        env = {ENV_PREFIX + name.upper(): str(value) for name, value in values.items()}
        compose = ["docker", "compose", "--project-name", "lmcache-xpu-integration"]
        env = {**os.environ, **env, "VLLM_SERVER_DEV_MODE": "1"}
        try:
            subprocess.run([*compose, "up", "--wait", "engine"], cwd=ROOT, env=env, check=True)
            url = f"http://127.0.0.1:{values['port']}"
            with contextlib.closing(Engine(url, api_key=changes.get("api_key"))) as engine:
                yield engine
        finally:
            subprocess.run([*compose, "down", "--volumes"], cwd=ROOT, env=env, check=True)


class Url:
    """An engine, or a router before several, that someone else has started."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key

    @contextlib.contextmanager
    def start(self, **changes: Any) -> Iterator[Engine]:
        """What is there, as it is: tests that want it otherwise are skipped."""
        if changes.pop("own", False):
            pytest.skip("needs an engine with settings of its own (--stack processes)")
        engine = Engine(self._url.rstrip("/"), api_key=self._api_key)
        with contextlib.closing(engine):
            yield engine


Stack = Processes | Compose | Url
