"""The sizes that README, docs and .env.example give are sizes that our own doctor passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_xpu.doctor import memory
from lmcache_xpu.launch.machine import Machine, TorchFacts
from lmcache_xpu.launch.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", ROOT / ".env.example", *sorted((ROOT / "docs").rglob("*.md"))]
SIZE = re.compile(r"(?:--cpu-gib[ =]|\bcpu_gib: |LMCACHE_XPU_CPU_GIB=)(\d+(?:\.\d+)?)")
EXAMPLES = [
    (path.relative_to(ROOT).as_posix(), float(size))
    for path in FILES
    for size in SIZE.findall(path.read_text())
]
GIB = 2**30


def test_there_are_examples_and_they_are_seen():
    assert {"README.md", ".env.example", "docs/guides/kubernetes.md"} <= {
        name for name, _ in EXAMPLES
    }
    for path in FILES:  # none in another form
        mentions = re.findall(r"(?i)cpu[-_]gib[`\"]?\s*[:= ]\s*[\"`]?\d", path.read_text())
        assert len(mentions) == len(SIZE.findall(path.read_text())), path


@pytest.mark.parametrize(("where", "cpu_gib"), EXAMPLES)
def test_the_doctor_passes_every_example(tmp_path, where, cpu_gib):
    """On the smallest cards that are meant, and on a machine with a quarter more than the tier."""
    kib = int(1.25 * cpu_gib * 2**20)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
    machine = Machine(root=tmp_path, environ={})
    settings = Settings.load({"model": "org/model", "device": "xpu", "cpu_gib": cpu_gib})
    assert memory.check_memory(machine, settings).outcome == "ok"
    for card_gib in (16, 24):
        facts = TorchFacts("2.14.0+xpu", (("Intel Arc Pro", card_gib * GIB),))
        check = memory.check_pinned(machine, settings, facts.gpus)
        assert check.outcome == "ok", f"{where}: {check}"
