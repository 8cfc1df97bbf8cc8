"""LMCache's server beside an engine: started before it, started again when it ends, ended with it.

`serve` becomes the engine (see `launch.serve`), so nothing of it is left to look after the server.
A process of its own does: this module, run as a program. The kernel tells it when the engine ends.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers.disk.server_option import server_option

__all__ = ["check_shared_memory", "server_command", "start_server", "with_smallest_chunks"]

# Not the program `lmcache`: it may be in no directory that is known, as after `pip --target`.
PROGRAM = (sys.executable, "-m", "lmcache.cli.main", "server")
HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
POOL_PREFIX = "lmcache_l1_pool_"  # LMCache's, before the name of its shared memory
START_S = 120.0  # imports take most of it
AGAIN_S = 1.0
END_S = 5.0
MODULE = "lmcache_xpu.mp_connector.server_module"  # says where the chunks of a hit are
LEASE_S = 30  # of memory for a write that a worker never finishes; longer than a worker waits
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def server_command(settings: Settings, ports: Sequence[int]) -> list[str]:
    """Return the command line of a server for an engine of these settings.

    Args:
        settings: of the engine. The server has the memory and the disk of all of its devices.
        ports: to listen on: for workers, for LMCache's HTTP interface, and for its metrics.
    """
    port, http, metrics = ports
    options: dict[str, object] = {
        "--host": HOST,
        "--port": port,
        "--http-port": http,
        "--prometheus-port": metrics,
        "--chunk-size": settings.chunk_tokens,
        "--l1-size-gb": settings.cpu_gib * settings.devices,  # of 2**30 bytes
        "--shm-name": f"lmcache-xpu-{os.geteuid()}-{port}",
        "--supported-transfer-mode": "engine_driven",
        "--eviction-policy": "LRU",
        "--max-workers": 4,
        "--l1-write-ttl-seconds": LEASE_S,
        "--server-module": json.dumps({"module_path": MODULE}),
    }
    if settings.disk_path is not None:
        assert settings.disk_gib is not None
        size_gib = settings.disk_gib * settings.devices
        options["--l2-adapter"] = server_option(settings.disk_path, size_gib)
        options["--l2-prefetch-policy"] = "retain"  # in memory what came from disk, as in process
    flags = ["--no-l1-use-lazy", "--disable-grpc-metrics", "--separate-object-groups"]
    return [*PROGRAM, *flags, *(str(word) for option in options.items() for word in option)]


def with_smallest_chunks(settings: Settings) -> Settings:
    """Return settings whose server has chunks of one block, for a model with states.

    LMCache rounds chunks up to whole blocks when the engine registers, which alone knows them: a
    block of attention has to be as large as a state. A state is kept at the end of any block.
    """
    if "chunk_tokens" in settings.model_fields_set or settings.server_url is not None:
        return settings
    return settings.model_copy(update={"chunk_tokens": 1})


def start_server(
    settings: Settings,
    command: Callable[[Settings, Sequence[int]], list[str]] = server_command,
) -> str:
    """Start a server that ends with this process, whatever it becomes; return its URL.

    Waits until it listens to workers and shows its metrics.

    Args:
        settings: of the engine that it is for.
        command: makes its command line.

    Raises:
        SettingsError: it does not come up.
    """
    ports = _free_ports(3)
    keeper = subprocess.Popen(
        [sys.executable, "-m", "lmcache_xpu.launch.cache_server", *command(settings, ports)],
        preexec_fn=_end_with_parent,
    )
    deadline = time.monotonic() + START_S
    while not all(map(_listens, ports[:2])):
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.terminate()
            keeper.wait()
            raise SettingsError(
                "an LMCache server that does not come up",
                f"one that listens within {START_S:.0f} s",
                "Its own lines are above. It can be started by hand, and named by server_url.",
            )
        time.sleep(0.1)
    print(f"LMCache's server counts at http://{HOST}:{ports[1]}/metrics", flush=True)
    return f"tcp://{HOST}:{ports[0]}"


def check_shared_memory(settings: Settings) -> None:
    """Refuse a server whose memory is not free in /dev/shm: LMCache would lend none of it.

    Raises:
        SettingsError: too little.
    """
    needed = settings.cpu_gib * settings.devices * 2**30
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise SettingsError(
            f"{free / 2**30:.2f} GiB free in {SHARED_MEMORY}",
            f"{needed / 2**30:g} GiB for LMCache's server (cpu_gib x devices)",
            "Lower cpu_gib, or make it larger (docker: --shm-size; Kubernetes: an emptyDir with "
            "medium Memory).",
        )


def keep(command: Sequence[str]) -> None:
    """Run a server until this process is told to end, and start it again whenever it ends."""
    server: subprocess.Popen[bytes] | None = None
    options = dict(itertools.pairwise(command))

    def end(_signal: int, _frame: FrameType | None) -> None:
        if server is not None and server.poll() is None:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the engine, which may have requests to end
    while True:
        server = subprocess.Popen(command, preexec_fn=_end_with_parent)
        status = server.wait()
        print(f"LMCache's server ended with status {status}; it starts again", flush=True)
        # Engines give it back when its name is gone; the next server looks for room first.
        if name := options.get("--shm-name"):
            (SHARED_MEMORY / f"{POOL_PREFIX}{name}").unlink(missing_ok=True)
        time.sleep(AGAIN_S)


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


if __name__ == "__main__":
    keep(sys.argv[1:])
