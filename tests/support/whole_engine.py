"""An engine as `lmcache-xpu serve` runs it, with all of its processes and what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import httpx
from support.cache_server import CacheServer
from support.faulty_connector import FAULT_VARIABLE
from support.scripts import environment

from lmcache_xpu.harness.engine_process import free_port
from lmcache_xpu.launch.cache_server import POOL_PREFIX
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.serve import command
from lmcache_xpu.launch.settings import Settings

START_S = 200.0


class WholeEngine:
    """One engine on CPU, in a session of its own, by which its processes are known.

    An engine of several ranks has a server of LMCache beside it, which is not part of that.

    Args:
        model: directory of a model.
        log: of all of the engine's processes.
        ranks: workers that share each layer.
        fault: see `faulty_connector`; none by default.
        settings: more of them, and others than these tests have.
    """

    def __init__(
        self, model: Path, log: Path, *, ranks: int, fault: str = "", **settings: object
    ) -> None:
        self.log = log
        self.held: set[Path] = set()  # shared memory that the engine had when it was last asked
        self.settings = Settings.load(
            {
                "model": str(model),
                "port": free_port(),
                "device": "cpu",
                "dtype": "float32",
                "tensor_parallel": ranks,
                "block_tokens": 128,
                "cpu_gib": 0.125,
                "kv_cache_gib": 0.0625,
                "max_model_len": 1024,
                "enforce_eager": True,
                **settings,
            }
        )
        self._ranks, self._fault = ranks, fault
        self._server: CacheServer | None = None

    def __enter__(self) -> Self:
        self._directory = TemporaryDirectory(prefix="lmx")  # short: a socket's path has a limit
        self.temporary = Path(self._directory.name)
        if self._ranks > 1:
            self._server = CacheServer(self.log.with_name(f"{self.log.name} of the server"))
            self._server.start()
            at_server = {"cache": "server", "server_url": self._server.url}
            self.settings = self.settings.model_copy(update=at_server)
        argv = command(self.settings)
        at = argv.index("--kv-transfer-config") + 1
        faulty = {
            "kv_connector": "FaultyConnector",
            "kv_connector_module_path": "support.faulty_connector",
        }
        argv[at] = json.dumps({**json.loads(argv[at]), **faulty})
        changes = {
            "TMPDIR": str(self.temporary),
            FAULT_VARIABLE: self._fault,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self._ranks))),
        }
        env = {**environment(), **engine_variables(self.settings), **changes}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._server is not None:
            self._server.kill()
        self._directory.cleanup()

    def processes(self) -> dict[int, str]:
        """Titles of all processes that still run."""
        self.process.poll()  # collects it
        titles, held = of_session(self.process.pid)
        self.held |= held
        return {pid: title[:80].strip() for pid, title in titles.items()}

    def wait_for_start(self) -> bool:
        """Whether it serves; False where it has said that it does not, or has ended."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if self._fault and f"planted in {self._fault.partition(':')[0]}" in self.said():
                return False
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self._url("/health"), timeout=5).status_code == httpx.codes.OK:
                    self.processes()
                    return True
            self.processes()
            time.sleep(0.5)
        return False

    def answers(self) -> bool:
        """Whether it answers a prompt of two chunks."""
        asked = {"model": str(self.settings.model), "prompt": [*range(300, 850)], "max_tokens": 4}
        try:
            answer = httpx.post(self._url("/v1/completions"), json=asked, timeout=60)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    def kill(self, title: str) -> None:
        """Kill its only process whose title begins so."""
        [pid] = [pid for pid, line in self.processes().items() if line.startswith(title)]
        os.kill(pid, signal.SIGKILL)

    def wait_for_end(self, seconds: float) -> dict[int, str]:
        """Processes that run after so many seconds; none as soon as all have ended."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def memory_left(self) -> list[str]:
        """Shared memory that it had and that is still there."""
        return sorted(
            str(path)
            for path in self.held
            if path.exists() and not path.name.startswith(POOL_PREFIX)  # the server's
        )

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.settings.port}{path}"


def of_session(number: int) -> tuple[dict[int, str], set[Path]]:
    """The command lines of a session's processes that run, and the shared memory they have."""
    titles: dict[int, str] = {}
    held: set[Path] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == number and stat[0] not in ("Z", "X"):
                line = (directory / "cmdline").read_bytes()
                titles[int(directory.name)] = line.replace(b"\0", b" ").decode()
                held |= _shared_memory(directory / "maps")
    return titles, held


def _shared_memory(maps: Path) -> set[Path]:
    paths = (line.partition("/dev/shm/")[2] for line in maps.read_text().splitlines())
    return {Path("/dev/shm", name) for name in paths if name and "(deleted)" not in name}
