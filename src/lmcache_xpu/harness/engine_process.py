"""Start a vLLM engine as a child process, wait until it answers, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import httpx
import psutil

from lmcache_xpu.errors import EngineError
from lmcache_xpu.launch.cache_server import end_with_parent
from lmcache_xpu.launch.preflight import preflight
from lmcache_xpu.launch.serve import METRICS_VARIABLE, command, environment, resolve_device
from lmcache_xpu.launch.settings import Settings

LOG_LINES = 15  # of the log, in an error
POLL_S = 0.2
PORTS = (20_000, 30_000)  # below ip_local_port_range and Kubernetes' node ports
INTERRUPTED_S = 1.5  # that an engine gets to stop after Ctrl-C
KILL_S = 10.0  # that a killed process may take to go

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
# An exception's own line, as Python or vLLM's logger writes it, from any of its processes.
_ERROR_LINE = re.compile(r"(\([^)]*\) )?(ERROR [^\]]*\] )?[\w.]*(Error|Exception): ")


class EngineProcess:
    """One engine: `with EngineProcess(settings, log) as engine: ... engine.url ...`.

    The engine is what `lmcache-xpu serve` would run with these settings. It has its own process
    group, so Ctrl-C reaches only us, and we stop it; should we be killed, the kernel ends it.
    Enter it from a thread that lives as long as the engine: Linux takes that thread's end for
    its parent's.

    Its output goes to `log`, which is overwritten. It has `start_s` seconds until it answers
    /health, and `stop_s` to stop. `argv` runs instead of it; `env` goes over this process's
    variables and the settings' own.

    Raises SettingsError, and nothing was started; or EngineError: it ended, or did not answer in
    time, and has been stopped.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        *,
        start_s: float = 300.0,
        stop_s: float = 30.0,
        argv: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = resolve_device(settings)
        self.log = log
        self._start_s = start_s
        self._stop_s = stop_s
        self._argv = list(argv or command(self.settings))
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._metrics: Path | None = None  # the engine's directory for them, if ours to remove

    @property
    def url(self) -> str:
        """The server's address, without a slash at the end."""
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, which is also its group's; None when it does not run."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        preflight(self.settings, os.environ)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = self._spawn(log)
        try:
            self._wait(self._process)
        except BaseException as error:  # whatever ends the wait, the engine ends with it
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Stop the engine; after Ctrl-C somebody waits for it, so at once."""
        if error is KeyboardInterrupt:
            self._stop_s = min(self._stop_s, INTERRUPTED_S)
        self.stop()

    def stop(self) -> None:
        """Stop the engine and everything it started; does nothing when it does not run.

        As a container's runtime does: SIGTERM to the server alone, which stops its own children,
        and SIGKILL to processes that are left.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            _ended(process, self._stop_s)
        finally:  # a second Ctrl-C shortens the wait, not the result
            for member in _running(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            _ended(process, KILL_S)
            if self._metrics is not None:
                shutil.rmtree(self._metrics, ignore_errors=True)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        env = environment(self.settings, os.environ) | self._env
        self._metrics = None if METRICS_VARIABLE in os.environ else Path(env[METRICS_VARIABLE])
        return subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            if (code := process.poll()) is not None:
                raise self._failure(f"the engine ended after {waited:.0f} s with code {code}")
            if waited > self._start_s:
                raise self._failure(f"no answer from {self.url}/health for {waited:.0f} s")
            with contextlib.suppress(httpx.TransportError):  # not listening yet
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(POLL_S)

    def _failure(self, event: str) -> EngineError:
        lines = self.log.read_text(errors="replace").splitlines()
        tail = lines[-LOG_LINES:]
        # The engine's first error is the cause; those after it say that it did not start.
        if cause := next((line for line in lines if _ERROR_LINE.match(line)), None):
            tail = [cause, "...", *tail] if cause not in tail else tail
        return EngineError(event, "an engine that answers", "\n".join([f"{self.log} has:", *tail]))


def free_port() -> int:
    """Return a port that nothing listens on now, on the loopback interface.

    It lies below the ports that the kernel gives out: an engine binds its port seconds from now,
    and until then another process would be given the same.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until no process of the group runs, or for `seconds`."""
    deadline = time.monotonic() + seconds
    # poll() collects our own child, which would stay a zombie.
    while process.poll() is None or any(_running(process.pid)):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S / 4)


def _running(group: int) -> Iterator[int]:
    """Yield the group's processes, no zombies: a container's first process may collect none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() not in _ENDED:
                yield process.pid
