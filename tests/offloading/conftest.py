from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from lmcache_xpu import versions

if Version(str(versions.installed().vllm)) < Version("0.30"):
    collect_ignore_glob = ["test_*.py"]  # whose interface of tiers is another


@pytest.fixture
def open_host(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make hosts over one directory; all are closed at the end."""
    from support.offloading import Host, ours

    hosts = []

    def make(gib: float = 1, options: dict[str, Any] | None = None, **host: Any) -> Host:
        hosts.append(Host(ours(tmp_path, gib, **(options or {})), **host))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
