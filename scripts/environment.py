"""The environment `.venv`: the CPU engine, LMCache, this package and its development tools.

uv is installed into the environment itself. Versions come from pyproject.toml and constraints.txt.

PyTorch's CPU build is taken from pip's find-links where these hold it (an offline machine),
and from PyTorch's CPU wheel index everywhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "bootstrap.sha256"
UV = "uv==0.13.8"
EXTRAS = ("cpu", "dev", "docs", "loadtest")
# Measured on x86-64 with Python 3.11, November 2026.
DOWNLOAD_GIB = 1.1
INSTALLED_GIB = 4.3
SILENT_S = 10  # between two signs of life, where no terminal shows them
LOG_LINES = 20  # of uv's output, after a failure
DISK_GIB = 6  # what is installed, and the wheels while they are unpacked


def fail(problem: str, fix: str) -> NoReturn:
    """End with one readable line instead of a traceback."""
    name = Path(sys.argv[0]).stem
    sys.exit(f"{name}: {problem}\n{' ' * len(name)}  {fix}")


def run(*command: str, env: dict[str, str] | None = None, quiet: bool = False) -> bool:
    """Run a command; True on success. With `quiet` its output is dropped."""
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, env=env, cwd=ROOT, stdout=sink, stderr=sink).returncode == 0


def run_quietly(*command: str, env: dict[str, str], log: Path) -> bool:
    """Run a command whose output goes to a file; True on success.

    One line says for how long it has been running, and what it does. After a failure the end of
    its output is shown.
    """
    begin, is_terminal = time.monotonic(), sys.stdout.isatty()
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=sink, stderr=sink)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1 if is_terminal else SILENT_S)
                doing = (log.read_text(errors="replace").splitlines() or [""])[-1].strip()
                line = f"           {time.monotonic() - begin:4.0f} s  {doing}"[:79]
                print(f"\r{line:<79}" if is_terminal else ".", end="", flush=True)
        finally:
            process.kill()
            process.wait()
            print()
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()
        print(f"The end of {log}:", *lines[-LOG_LINES:], sep="\n", file=sys.stderr, flush=True)
    return process.returncode == 0


def pip_find_links(python: Path) -> str | None:
    """The find-links that pip is configured with, in uv's form (comma separated)."""
    command = [str(python), "-m", "pip", "config", "get"]
    for key in (":env:.find-links", "global.find-links", "user.find-links"):
        done = subprocess.run([*command, key], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return ",".join(done.stdout.split())
    return None


def uv_environment(python: Path) -> dict[str, str]:
    """What uv needs to know: the environment, the time it may take, and where torch is."""
    env = {**os.environ, "VIRTUAL_ENV": str(VENV), "UV_HTTP_TIMEOUT": "300"}
    if links := pip_find_links(python):
        env.setdefault("UV_FIND_LINKS", links)
    torch = re.search(r"torch==[^\"+\s]+", (ROOT / "pyproject.toml").read_text())
    if torch is None:
        fail("no pinned torch in pyproject.toml.", "Pin it: torch==VERSION in the extra cpu.")
    probe = ("pip", "install", "--dry-run", "--reinstall", "--no-deps", f"{torch[0]}+cpu")
    if not run(str(VENV / "bin" / "uv"), *probe, env=env, quiet=True):
        env["UV_TORCH_BACKEND"] = "cpu"  # not in the find-links: PyTorch's own CPU index
    return env


def lock(*options: str) -> None:
    """Renew constraints.txt, for the oldest Python and C library that are served."""
    compile_ = (str(VENV / "bin" / "uv"), "pip", "compile", "-q", "pyproject.toml")
    extras = (flag for extra in EXTRAS for flag in ("--extra", extra))
    what = (*extras, "--no-header", "--no-annotate")
    where = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
    env = uv_environment(VENV / "bin" / "python")
    if not run(*compile_, *what, *where, "-o", "constraints.txt", *options, env=env):
        fail("uv could not resolve the versions.", "See its message above.")


def main() -> None:
    """Create or update the environment."""
    if sys.platform != "linux":
        fail(f"platform {sys.platform} found, linux needed (vLLM's CPU wheels).", "Use Linux.")
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return
    free = shutil.disk_usage(ROOT).free / 2**30
    if not VENV.exists() and free < DISK_GIB:
        fail(f"{free:.1f} GiB free in {ROOT}, {DISK_GIB} needed.", "Free some disk space.")

    python = VENV / "bin" / "python"
    print(
        f"bootstrap: {'updating' if STAMP.exists() else 'setting up'} .venv: vLLM on CPU, LMCache, "
        "this package and its tools.\n"
        f"           The first time this downloads about {DOWNLOAD_GIB:g} GiB and installs "
        f"{INSTALLED_GIB:g} GiB.",
        flush=True,
    )
    if not python.exists():
        try:
            venv.create(VENV, with_pip=True)
        except (subprocess.CalledProcessError, OSError) as error:
            shutil.rmtree(VENV, ignore_errors=True)
            fail(
                f"Python could not create {VENV}: {error}",
                "On Debian and Ubuntu install the package python3-venv.",
            )
    if not run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", UV):
        fail("pip could not install uv.", "Check the network and pip's configuration above.")

    env = uv_environment(python)
    uv = str(VENV / "bin" / "uv")
    what = f".[{','.join(EXTRAS)}]"
    options = ["-c", "constraints.txt"]
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # Python would compile anew in every process: 25 s of each engine's start on two cores.
        options.append("--compile-bytecode")
    install = (uv, "pip", "install", *options, "-e", what)
    if not run_quietly(*install, env=env, log=VENV / "bootstrap.log"):
        fail("uv could not install the packages.", "See its message above; then run again.")
    STAMP.write_text(digest)
