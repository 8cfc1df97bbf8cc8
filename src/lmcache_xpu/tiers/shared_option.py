"""How LMCache's server is told of the shared tier.

Neither LMCache nor torch is imported: `serve` asks.
"""

from __future__ import annotations

import json

__all__ = ["PASSWORD_VARIABLE", "URL_KEY", "shared_option"]

URL_KEY = "shared.url"
# LMCache logs its options, and everyone on a machine can read its processes' arguments.
PASSWORD_VARIABLE = "LMCACHE_XPU_REMOTE_PASSWORD"


def shared_option(url: str) -> str:
    """Return the value of `lmcache server`'s option `--l2-adapter` that switches the tier on.

    Args:
        url: of the Valkey or Redis, redis://HOST:PORT or rediss://HOST:PORT.
    """
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "lmcache_xpu.shared",
            "class_name": "SharedL2Adapter",
            "adapter_params": {URL_KEY: url},
            "shared": True,
        }
    )
