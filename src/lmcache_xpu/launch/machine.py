"""The machine that `serve` and `doctor` look at: this one, or a planted one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_xpu.launch import siblings


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """PyTorch's version, and what it sees of Intel GPUs."""

    version: str
    gpus: tuple[tuple[str, int], ...] = ()  # the name of each, and bytes of memory

    @classmethod
    def probe(cls) -> TorchFacts:
        """Ask the installed PyTorch."""
        import torch

        gpus = [torch.xpu.get_device_properties(i) for i in range(torch.xpu.device_count())]
        return cls(torch.__version__, tuple((gpu.name, gpu.total_memory) for gpu in gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Ways to look at a machine. The defaults look at this one."""

    root: Path = Path("/")  # holds /dev, /sys and /proc
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    loads: Callable[[str], bool] = _loads  # whether a shared library can be loaded
    torch: Callable[[], TorchFacts] = TorchFacts.probe
    refusal: Callable[[], str] = siblings.refusal  # of a sibling's descriptor; empty: none

    def render_nodes(self) -> list[Path]:
        """Return the device nodes that compute goes through."""
        return sorted((self.root / "dev/dri").glob("renderD*"))

    def memory_bytes(self) -> int:
        """Return the size of all memory, or the container's limit when that is less."""
        total = self._meminfo("MemTotal")
        for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, and v1
            file = self.root / "sys/fs/cgroup" / limit
            if file.is_file() and (text := file.read_text().strip()) != "max":
                total = min(total, int(text))
        return total

    def available_bytes(self) -> int:
        """Return the size of the memory that is available now, of the whole machine."""
        return self._meminfo("MemAvailable")

    def file_system(self, path: Path) -> str:
        """Return the type of the file system that `path` is on; empty when the mounts don't say."""
        mount, file_system = "", ""
        for line in (self.root / "proc/mounts").read_text().splitlines():
            _, directory, kind, *_ = line.split()
            if path.is_relative_to(directory) and len(directory) >= len(mount):
                mount, file_system = directory, kind
        return file_system

    def _meminfo(self, name: str) -> int:
        for line in (self.root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise ValueError(f"no {name} in {self.root}/proc/meminfo")
