"""Install LMCache and this package beside the vLLM that is there, and change nothing of vLLM's.

Run it with the Python that vLLM is installed for:

    python3 scripts/install.py

What is installed are uv's constraints: a package that does not fit them ends this with uv's
message, and nothing is installed. An LMCache of another version is replaced. Which of LMCache's
requirements hold is said in pyproject.toml. pip alone can't do it: it would take several of vLLM's
packages back to what LMCache's wheel asks for. uv comes from the PATH, else pip fetches it for the
time of this call.

LMCACHE_VERSION names another accepted LMCache than the pinned one.

Arguments are uv's: `--dry-run` to look, `--break-system-packages` for Ubuntu's own Python.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import ROOT, UV, fail, pip_find_links, run


def find_uv(folder: Path) -> str:
    """uv of the PATH, else one that pip puts into `folder`."""
    if uv := shutil.which("uv"):
        return uv
    pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    if not run(*pip, "--target", str(folder), UV):
        fail(f"no uv, and pip of {sys.executable} could not fetch it.", "Install uv; run again.")
    return str(folder / "bin" / "uv")


def installed(uv: str, env: dict[str, str]) -> str:
    """The installed packages as constraints, less those that came from a file or a directory.

    Less LMCache as well: one of another version is replaced.
    """
    command = [uv, "pip", "freeze", "--exclude-editable", "--python", sys.executable]
    frozen = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if frozen.returncode:
        fail("uv could not list what is installed.", frozen.stderr.strip())
    lines = frozen.stdout.splitlines(True)
    return "".join(line for line in lines if " @ " not in line and not line.startswith("lmcache"))


def main(*options: str) -> None:
    """Install into the environment of the running Python."""
    if importlib.util.find_spec("vllm") is None:
        fail(
            f"no vLLM for {sys.executable}.",
            "Run this with the Python that has it: the first line of the program `vllm` names it.",
        )
    python = Path(sys.executable)
    env = dict(os.environ)
    if links := pip_find_links(python):
        env.setdefault("UV_FIND_LINKS", links)
    # An image has the wheel, a clone the sources.
    package = next((ROOT / "wheels").glob("*.whl"), ROOT)
    with tempfile.TemporaryDirectory() as folder:
        uv = find_uv(Path(folder))
        constraints = Path(folder) / "installed.txt"
        constraints.write_text(installed(uv, env))
        install = (uv, "pip", "install", "--python", str(python), "-c", str(constraints))
        what = [f"lmcache-xpu[lmcache] @ {package.as_uri()}"]
        if version := env.get("LMCACHE_VERSION"):
            what = [f"lmcache-xpu @ {package.as_uri()}", f"lmcache=={version}"]
        if not run(*install, *options, *what, env=env):
            fail(f"uv could not install into {sys.prefix}.", "See its message above.")


if __name__ == "__main__":
    main(*sys.argv[1:])
