"""Which functions of this package run while something happens, in all threads of a process."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


def _folder(package: str) -> str:
    """Return where a package lies, without importing it: LMCache has to wait for vLLM."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


OURS, LMCACHE = _folder("lmcache_xpu"), _folder("lmcache")


class CallCounts:
    """Counts calls. To be made before the threads that it is to see are started.

    Attributes:
        functions: of this package that ran, as `file:function`.
        entries: those of them that LMCache called.
    """

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.entries: set[str] = set()
        self._counts = False
        threading.setprofile(self._profile)

    @property
    def files(self) -> set[str]:
        """Files of the functions."""
        return {function.partition(":")[0] for function in self.functions}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while a block runs."""
        self.functions, self.entries = set(), set()
        sys.setprofile(self._profile)
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
            sys.setprofile(None)

    def report(self) -> dict[str, Any]:
        """Return what was counted, for JSON."""
        return {
            "functions": sorted(self.functions),
            "files": sorted(self.files),
            "entries": sorted(self.entries),
        }

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self._counts or event != "call" or not code.co_filename.startswith(OURS):
            return
        if code.co_name.startswith("<"):  # a comprehension is a part of its function
            return
        function = f"{code.co_filename.removeprefix(OURS + '/')}:{code.co_qualname}"
        self.functions.add(function)
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(LMCACHE):
            self.entries.add(function)


# What a hit and a store of one request may run: functions, and files. The disk tier is told of a
# hit, so that the end of the prompt is evicted first there, too.
MOST = {"hit": (215, 37), "store": (240, 40)}
# What LMCache may call: its adapters of other tiers, and the memory that makes room for itself.
ENTRIES = ("cache/room.py:Room.reserve_write", "tiers/")


def check_walk(walk: dict[str, Any]) -> None:
    """Assert that a hit and a store run few functions, and that LMCache calls hardly any."""
    for name, (functions, files) in MOST.items():
        assert len(walk[name]["functions"]) <= functions, name
        assert len(walk[name]["files"]) <= files, name
        assert [each for each in walk[name]["entries"] if not each.startswith(ENTRIES)] == []
