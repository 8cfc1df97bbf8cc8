"""LMCache's server beside an engine: started before it, started again when it ends, ended with it.

`serve` becomes the engine (see `launch.serve`), so nothing of it is left to look after the server.
A process of its own does: this module, run as a program. The kernel tells it when the engine ends.
It asks the server every few seconds, and starts a server anew that no longer answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers import (
    EVICTION_POLICY,
    EVICTION_WATERMARK,
    PASSWORD_VARIABLE,
    disk_option,
    shared_option,
)

PROGRAM = (sys.executable, "-m", "lmcache_xpu.server.server_program")
NAMES = "lmcache-xpu-"  # beginning of the names of servers that are started with an engine
PAGES = "127.0.0.1:0"  # of health and metrics; the server takes a free port, and says which
SHARED_MEMORY = Path("/dev/shm")
POOL_PREFIX = "lmcache_l1_pool_"  # LMCache's, before the name of its shared memory
START_S = 120.0  # imports take most of it
AGAIN_S = 1.0
END_S = 5.0
ASK_S = 5.0  # between two questions whether it works
ANSWER_S = 10.0  # that it has for an answer; the page itself waits 5 for the server
SILENT = 3  # questions without an answer, after which it is started anew
LEASE_S = 30  # of memory for a write that a worker never finishes; longer than a worker waits
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Variables of the system, of Python, of LMCache and of drivers.
_NEEDED = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TZ|TMPDIR|LANG|VIRTUAL_ENV|(LC|LD|XDG|PYTHON|LMCACHE|OMP|MKL|KMP"
    "|OPENBLAS|NUMBA|TORCH|TRITON|ONEAPI|ZE|SYCL|UR|CCL|CUDA|NVIDIA)_?.*"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|_PW", re.IGNORECASE)
_LIBC = ctypes.CDLL(None)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the user's


def server_command(settings: Settings, socket: Path, pages: str = PAGES) -> list[str]:
    """Return the command line of a server that has the tiers of all devices of an engine.

    It answers workers at the file `socket`, and shows health and metrics at the address `pages`.
    """
    options: dict[str, object] = {
        "--chunk-size": settings.chunk_tokens,
        "--l1-size-gb": settings.cpu_gib * settings.devices,  # of 2**30 bytes
        # Nobody can make a segment of that name first: the directory's is drawn at random.
        "--shm-name": socket.parent.name,
        "--supported-transfer-mode": "engine_driven",
        "--eviction-policy": EVICTION_POLICY,
        "--eviction-trigger-watermark": EVICTION_WATERMARK,
        "--max-workers": 4,
        "--l1-write-ttl-seconds": LEASE_S,
    }
    tiers = []  # in the order in which they are asked
    if settings.disk_path is not None:
        assert settings.disk_gib is not None
        size_gib = settings.disk_gib * settings.devices
        tiers += ["--l2-adapter", disk_option(settings.disk_path, size_gib)]
    if settings.remote_url is not None:
        tiers += ["--l2-adapter", shared_option(settings.remote_url)]
    if tiers:
        options["--l2-prefetch-policy"] = "retain"  # in memory what came from there
    flags = ["--no-l1-use-lazy", "--disable-grpc-metrics", "--separate-object-groups"]
    named = (str(word) for option in options.items() for word in option)
    return [*PROGRAM, str(socket), pages, *flags, *tiers, *named]


def server_environment(
    environ: Mapping[str, str], settings: Settings | None = None
) -> dict[str, str]:
    """Return what LMCache's server needs of an environment; no secret but the shared tier's."""
    needed = {
        name: value
        for name, value in environ.items()
        if _NEEDED.fullmatch(name) and not _SECRET.search(name)
    }
    if settings is not None and settings.remote_url and settings.remote_password is not None:
        needed[PASSWORD_VARIABLE] = settings.remote_password.get_secret_value()
    return needed | {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}


def start_server(
    settings: Settings, command: Callable[[Settings, Path], list[str]] = server_command
) -> str:
    """Start a server that ends with this process, whatever it becomes; return its URL.

    `command` makes its command line, of the engine's settings and of the server's socket. Raises
    SettingsError: it does not come up.
    """
    socket = Path(tempfile.mkdtemp(prefix=NAMES)) / "server.sock"  # mode 0700
    lock = lock_pool(socket.parent.name)
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, *command(settings, socket)],
        preexec_fn=end_with_parent,
        env=server_environment(os.environ, settings),
        pass_fds=[lock],  # which it holds until it ends
    )
    os.close(lock)
    deadline = time.monotonic() + START_S
    while not answers(socket):
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.terminate()
            keeper.wait()
            raise SettingsError(
                "an LMCache server that does not come up",
                f"one that answers within {START_S:.0f} s",
                "Its own lines are above. It can be started by hand, and named by server_url.",
            )
        time.sleep(0.1)
    pages = Path(f"{socket}.http").read_text()
    print(f"LMCache's server counts at http://{pages}/metrics", flush=True)
    return f"ipc://{socket}"


def answers(socket: Path) -> bool:
    """Whether the server at a socket is up, and answers what a worker would ask."""
    try:
        pages = Path(f"{socket}.http").read_text()
        with _OPENER.open(f"http://{pages}/healthcheck", timeout=ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


def lock_pool(name: str) -> int:
    """Mark a server's shared memory as used, for as long as the returned file stays open."""
    lock = os.open(SHARED_MEMORY / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def clear_pools() -> None:
    """Give back the shared memory of killed servers of this user: a pod's outlives containers."""
    for path in SHARED_MEMORY.glob(f"{NAMES}*.lock"):
        with contextlib.suppress(OSError):  # another user's, or gone
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_pool(path.stem)
            finally:
                os.close(lock)


def check_room(settings: Settings, directory: Path = SHARED_MEMORY) -> None:
    """Refuse a server whose memory is not free in /dev/shm: LMCache would lend none of it.

    What killed servers left there is given back first. Raises SettingsError if it is too little.
    """
    clear_pools()
    needed = settings.cpu_gib * settings.devices * 2**30
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise SettingsError(
            f"{free / 2**30:.2f} GiB free in {SHARED_MEMORY}",
            f"{needed / 2**30:g} GiB for LMCache's server (cpu_gib x devices)",
            "Lower cpu_gib, or make it larger (docker: --shm-size; Kubernetes: an emptyDir with "
            "medium Memory).",
        )


def keep(command: Sequence[str]) -> None:
    """Run a server until this process is told to end; start it again when it ends or is silent."""
    server: subprocess.Popen[bytes] | None = None
    socket = Path(command[len(PROGRAM)])
    pool = socket.parent.name

    def end(_signal: int, _frame: FrameType | None) -> None:
        if server is not None:
            _end(server)
        _remove_pool(pool)
        shutil.rmtree(socket.parent, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for terminals in (signal.SIGINT, signal.SIGHUP):  # the engine may have requests to end
        signal.signal(terminals, signal.SIG_IGN)
    while True:
        Path(f"{socket}.http").unlink(missing_ok=True)
        server = subprocess.Popen(command, preexec_fn=end_with_parent)
        _await_end(server, socket)
        print(f"LMCache's server ended with status {server.wait()}; it starts again", flush=True)
        # Engines give it back when its name is gone; the next server looks for room first.
        (SHARED_MEMORY / f"{POOL_PREFIX}{pool}").unlink(missing_ok=True)
        time.sleep(AGAIN_S)


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_end(server: subprocess.Popen[bytes], socket: Path) -> None:
    """Wait until a server has ended; end it if it does not answer."""
    silent, up_before = 0, time.monotonic() + START_S
    while silent < SILENT:
        try:
            server.wait(ASK_S)
            return
        except subprocess.TimeoutExpired:
            pass
        if answers(socket):
            silent, up_before = 0, time.monotonic()
        elif time.monotonic() > up_before:
            silent += 1
    print(f"LMCache's server did not answer {SILENT} times; it is ended", flush=True)
    _end(server)


def _remove_pool(name: str) -> None:
    for left in (f"{POOL_PREFIX}{name}", f"{name}.lock"):
        (SHARED_MEMORY / left).unlink(missing_ok=True)


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    keep(sys.argv[1:])
