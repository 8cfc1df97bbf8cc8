"""How LMCache's server is told of the disk tier.

Neither LMCache nor torch is imported: `serve` asks.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["server_option"]


def server_option(path: Path, gib: float, threads: int | None = None, *, engine: int = 0) -> str:
    """Return the value of `lmcache server`'s option `--l2-adapter` that switches the tier on.

    Args:
        path: directory on a local disk; the server's is made in it.
        gib: what the server may use of it.
        threads: reads at a time, and half as many writes; the tier's default if None.
        engine: number among engines that share the directory, each with a cache of its own.
    """
    params: dict[str, object] = {"disk.path": str(path), "disk.gib": gib}
    if engine:
        params["disk.engine"] = engine
    if threads is not None:
        params["disk.threads"] = threads
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "lmcache_xpu.disk.l2_adapter",
            "class_name": "DiskL2Adapter",
            "adapter_params": params,
        }
    )
