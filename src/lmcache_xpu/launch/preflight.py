"""The checks before a start: what would fail, or be ignored, minutes after it.

Each raises a SettingsError.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.engine_arguments import lmcache_config
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.versions import BUILDS_OF_VLLM, version_of

TIERS_SINCE = Version("0.30")  # of `OffloadingConnector` are as `offloading` expects them
SERVER_S = 1.0  # that LMCache's server has to greet; the command itself starts in less


def preflight(settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse what would fail, or be ignored, minutes later, on any machine."""
    check_environment(settings, environ)
    if settings.is_vllm:
        check_vllm(version_of(*BUILDS_OF_VLLM))
    check_model(settings.model)
    check_port(settings.host, settings.port)


def check_vllm(version: str | None) -> None:
    """Refuse a vLLM whose tiers take no disk tier of others: `cache=vllm`."""
    if version is not None and Version(version) < TIERS_SINCE:
        raise SettingsError(
            f"vLLM {version} with cache=vllm",
            f"vLLM {TIERS_SINCE} or newer",
            "Use cache=in-process, or a newer vLLM.",
        )


def check_environment(settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse other ways to set what is set here: one of the two would silently lose."""
    variables = {
        "VLLM_CPU_KVCACHE_SPACE",
        *(f"LMCACHE_{k.upper()}" for k in lmcache_config(settings)),
        *(("LMCACHE_CHUNK_SIZE", "LMCACHE_MAX_LOCAL_CPU_SIZE") if settings.is_local else ()),
    }
    for name in sorted(variables & environ.keys()):
        raise SettingsError(
            f"{name}={environ[name]} in the environment",
            f"only {ENV_PREFIX}* variables and options to decide this",
            f"Unset {name}.",
        )


def check_model(model: str) -> None:
    """Refuse a path that holds no model; a name on a hub is not looked up."""
    path = Path(model).expanduser()
    is_path = model.startswith(("/", "./", "../", "~")) or path.exists()
    if is_path and not (path / "config.json").is_file():
        raise SettingsError(
            f"model={model}, without a config.json",
            "a model directory with a config.json, or the name of a model on a hub",
            "Check the path." if not path.exists() else "",
        )


def check_port(host: str, port: int) -> None:
    """Refuse an address that somebody else listens on, or that is not this machine's."""
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


def check_server(url: str) -> None:
    """Refuse an LMCache server that does not listen within `SERVER_S`, or another user's."""
    from lmcache_xpu.server.server_socket import await_server, check_socket  # imports ZeroMQ

    check_socket(url)
    await_server(url, SERVER_S)


def check_render_nodes(machine: Machine) -> None:
    """Refuse a machine without a render node of an Intel GPU that this user may open."""
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


def check_directory(path: Path, name: str) -> None:
    """Make a directory, and refuse it if a file can't be written in it; `name` is its setting's."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        raise _unwritable(name, path, "a directory that has free space", error) from error


def check_file(path: Path, name: str) -> None:
    """Refuse a file that can't be written; its content stays as it is."""
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(name, path, "a file in a directory that exists", error) from error


def _unwritable(name: str, path: Path, expected: str, error: OSError) -> SettingsError:
    return SettingsError(
        f"{name} {path}, which can't be written ({error.strerror})",
        f"{expected} and that this user ({os.getuid()}) may write to",
        "Name another, or give this one to the user.",
    )
