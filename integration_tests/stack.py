"""The three ways to have an engine to test: processes here, the compose stack, or a URL."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from breaks import ENVIRONMENTS, SETTINGS
from engine import Engine

from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.launch.settings import Settings, variables

ROOT = Path(__file__).parent.parent
HOOKS = Path(__file__).parent / "hooks"
# Processes here run the package beside these tests, whichever one is installed.
PATHS = os.pathsep.join(map(str, (HOOKS, ROOT / "src")))
# Of random_model.EXACT in float32: 4 KiB per token, 1 MiB per chunk. All tiers are small, so that
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
    "loads": "always",  # this model may be computed as fast
    "served_model_name": "exact",
}


class Made:
    """What stacks that start engines share: numbered directories, small settings, hooks.

    Args:
        work: for logs, hooks and the like.
        model: that is served.
        broken: a part to take away, see breaks.py; none if empty.
    """

    def __init__(self, work: Path, model: Path, broken: str = "") -> None:
        self._work, self._model, self._broken = work, model, broken
        self._count, self._lock = 0, threading.Lock()

    def _next(self, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], Path]:
        """Settings, variables and the directory of one more engine."""
        with self._lock:
            self._count += 1
            place = self._work / f"engine-{self._count}"
        (place / "hooks").mkdir(parents=True)
        changes = {"model": str(self._model), **changes, **SETTINGS.get(self._broken, {})}
        env = {
            "PYTHONPATH": str(HOOKS),
            "HOOKS_DIRECTORY": str(place / "hooks"),
            "HOOKS_BREAK": self._broken,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
            **_own_core(),
            **changes.pop("env", {}),
        }
        if make := ENVIRONMENTS.get(self._broken):
            env |= make()
        return {**SMALL, **changes}, env, place


def _own_core() -> dict[str, str]:
    """A core for the engines of each of pytest-xdist's workers.

    Threads of two engines on one core wait for each other's time slices at every barrier.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": str(cores[int(worker) % len(cores)])}


class Processes(Made):
    """Engines as processes on this machine."""

    @contextlib.contextmanager
    def start(self, **changes: Any) -> Iterator[Engine]:
        """An engine with the small settings, changed; `env` has variables."""
        values, env, place = self._next(changes)
        env["PYTHONPATH"] = PATHS
        settings = Settings.load({"port": free_port(), **values})
        key = settings.api_key.get_secret_value() if settings.api_key else None
        with EngineProcess(settings, place / "log", env=env) as process:
            url = process.url.replace("0.0.0.0", "127.0.0.1")
            runner = Here(process, place / "hooks")
            with contextlib.closing(Engine(url, api_key=key, runner=runner)) as engine:
                yield engine


class Here:
    """The runner of `Processes`."""

    def __init__(self, process: EngineProcess, hooks: Path) -> None:
        self._process, self.hooks = process, hooks
        self.group = process.pid

    def log(self) -> str:
        return self._process.log.read_text(errors="replace")

    def kill(self) -> None:
        if self.group is not None:
            os.killpg(self.group, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._process.stop()


class Compose(Made):
    """The engine of compose.yaml, on CPU: its image, its rights, its entry point.

    The tests' directory is inside under its own name, and the engine runs as whoever tests, so
    that both see the same files. Everything else is compose.yaml's.
    """

    @contextlib.contextmanager
    def start(self, **changes: Any) -> Iterator[Engine]:
        """A project of its own with the small settings, changed."""
        values, env, project = self._next(changes)
        values = {"disk_path": None, "disk_gib": None, **values}
        (project / "cache").mkdir()
        port = free_port()
        file = project / "override.yaml"
        file.write_text(yaml.safe_dump(self._override(values, env, project)))
        there = There(project, file, {"API_PORT": str(port), "SHM_SIZE": "1gb"})
        try:
            there.compose("up", "--no-build", "--detach", "--wait", "engine-cpu")
            engine = Engine(f"http://127.0.0.1:{port}", api_key=values.get("api_key"), runner=there)
            with contextlib.closing(engine):
                yield engine
        finally:
            there.compose("down", "--volumes", "--timeout", "20")

    def _override(
        self, values: Mapping[str, Any], env: dict[str, str], project: Path
    ) -> dict[str, Any]:
        base = self._work.parent  # the model and the disk tiers are in here as well
        service = {
            "environment": env | variables(values),
            "healthcheck": {"interval": "2s"},
            "restart": "no",
            "user": f"{os.getuid()}:{os.getgid()}",
            "volumes": [
                f"{base}:{base}",
                f"{HOOKS}:{HOOKS}:ro",
                f"{project / 'cache'}:/cache",
            ],
        }
        return {"services": {"engine-cpu": service}}


@dataclass(frozen=True, slots=True)
class There:
    """The runner of `Compose`."""

    project: Path
    override: Path
    env: dict[str, str]
    group: None = None

    @property
    def hooks(self) -> Path:
        return self.project / "hooks"

    def compose(self, *args: str) -> str:
        """Run `docker compose`; its output.

        Settings of a .env beside compose.yaml are not for tests: the project is elsewhere.
        """
        name = f"integration-{os.getpid()}-{self.project.name}"
        command = ["docker", "compose", "--project-directory", str(self.project)]
        command += ["--project-name", name, "--profile", "*", "-f", str(ROOT / "compose.yaml")]
        done = subprocess.run(
            [*command, "-f", str(self.override), *args],
            env={**os.environ, **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            said = self.compose("logs", "--tail", "30") if args[0] == "up" else ""
            pytest.fail(f"docker compose {shlex.join(args)}: {done.stdout[-3000:]}\n{said}")
        return done.stdout

    def log(self) -> str:
        return self.compose("logs", "--no-log-prefix", "engine-cpu")

    def kill(self) -> None:
        self.compose("kill", "engine-cpu")

    def stop(self) -> None:
        self.compose("stop", "engine-cpu")


class Url:
    """An engine, or a router before several, that someone else has started."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key

    @contextlib.contextmanager
    def start(self, **_: Any) -> Iterator[Engine]:
        """What is there, as it is."""
        with contextlib.closing(Engine(self._url.rstrip("/"), api_key=self._api_key)) as engine:
            yield engine


Stack = Processes | Compose | Url


class Kept:
    """One engine for many tests; started again when a test has ended it.

    Args:
        stack: that starts it.
        settings: that it gets.
    """

    def __init__(self, stack: Stack, **settings: Any) -> None:
        self._stack, self._settings = stack, settings
        self._running = contextlib.ExitStack()
        self._engine: Engine | None = None

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def engine(self) -> Engine:
        """The one that runs."""
        if self._engine is None or not self._engine.alive():
            self._running.close()
            self._engine = self._running.enter_context(self._stack.start(**self._settings))
            self._engine.ask([300] * 300)  # what is compiled or allocated once
        return self._engine
