"""Where chunks outlive LMCache's CPU memory: on disk, and in a server that engines share.

Here is what all tiers have in common: the options by which LMCache is told of them, and warnings
that are not logged again for a while. Neither LMCache nor torch is imported: `serve` asks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Literal

URL_KEY = "shared.url"
# LMCache logs its options, and everyone on a machine can read its processes' arguments.
PASSWORD_VARIABLE = "LMCACHE_XPU_REMOTE_PASSWORD"
# LMCache's own eviction is off, see `cache.room`: a policy that names nothing, at a usage that
# can't be.
EVICTION_POLICY, EVICTION_WATERMARK = "noop", 2.0

# vLLM prints its own loggers only.
LOGGERS = {tier: logging.getLogger(f"vllm.lmcache_xpu.{tier}") for tier in ("disk", "shared")}
_QUIET_S = 60.0
_quiet_until: dict[str, float] = {}  # by message
_lock = threading.Lock()


def disk_option(path: Path, gib: float, *, engine: int = 0) -> str:
    """Return the value of `lmcache server`'s option `--l2-adapter` for a disk tier in a path.

    `engine` is a number among engines that share the path, each with a cache of its own.
    """
    params: dict[str, object] = {"disk.path": str(path), "disk.gib": gib}
    if engine:
        params["disk.engine"] = engine
    return _option("lmcache_xpu.tiers.disk.l2_adapter", "DiskL2Adapter", params)


def shared_option(url: str) -> str:
    """Return that option's value for the shared tier: redis://HOST:PORT or rediss://HOST:PORT."""
    return _option("lmcache_xpu.tiers.shared_l2", "SharedL2Adapter", {URL_KEY: url}, shared=True)


def complain(message: str, *args: object, tier: Literal["disk", "shared"] = "disk") -> None:
    """Log a warning of a tier, at most once a minute, however often its cause occurs."""
    with _lock:
        if time.monotonic() < _quiet_until.get(message, 0.0):
            return
        _quiet_until[message] = time.monotonic() + _QUIET_S
    LOGGERS[tier].warning(f"{tier} tier: {message}", *args)


def _option(module: str, name: str, params: dict[str, object], **more: bool) -> str:
    adapter = {"module_path": module, "class_name": name, "adapter_params": params}
    return json.dumps({"type": "plugin", **adapter, **more})
