"""Which slow parts of the tests have to run: those whose files changed since they last passed.

    python scripts/slow_parts.py unchanged containers    # exit status 0: it need not run
    python scripts/slow_parts.py passed containers "83 passed in 610 s"

A part is recorded with the hash of its files, in docs/results/slow-parts.json. `.ci/run` runs a
part whose files have another hash; `make nightly` runs every part.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from environment import ROOT, fail

RECORD = ROOT / "docs/results/slow-parts.json"
SOURCE = "src/lmcache_xpu/"
PACKAGES = ("constraints.txt", "pyproject.toml", f"{SOURCE}versions")
DATA_PATH = tuple(
    SOURCE + name
    for name in (
        "connector",
        "stock",
        "vllm_hooks",
        "copies",
        "server",
        "cache",
        "model",
        "gpu_connector",
        "tiers",
        "transfer",
    )
)
# What each part shows, by the files that can change its outcome.
PARTS: dict[str, tuple[str, ...]] = {
    "oldest": (*PACKAGES, *DATA_PATH, "scripts/matrix.py", "tests/engine", "tests/support"),
    "containers": (
        *PACKAGES,
        *("docker", "compose.yaml", "docker-bake.hcl", ".dockerignore", ".env.example"),
        *("monitoring", "scripts/install.py", "tests/containers"),
        *(f"{SOURCE}cli", f"{SOURCE}launch"),
    ),
    "tools": (
        *(*PACKAGES, *DATA_PATH),
        *(f"{SOURCE}{name}" for name in ("bench", "harness", "cli", "launch")),
        *("tests/bench", "tests/fuzz", "tests/support", "tests/engine/test_demo.py"),
        "tests/engine/test_server_soak.py",
    ),
    "loadtests": (*PACKAGES, "loadtests", "tests/loadtests", f"{SOURCE}harness"),
    "comparison": (*PACKAGES, *DATA_PATH, "loadtests", f"{SOURCE}launch", f"{SOURCE}harness"),
}

app = typer.Typer(add_completion=False, help=__doc__)
Part = Annotated[str, typer.Argument(help=", ".join(PARTS))]


def files_hash(part: str) -> str:
    """Return a hash of the names and contents that git has of a part's files."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "--", *PARTS[part]],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    return hashlib.sha256(listed).hexdigest()


@app.command()
def unchanged(part: Part) -> None:
    """Exit with 0 and say when a part passed if its files are as they were then."""
    last = _record().get(part, {})
    if last.get("files") != files_hash(part):
        sys.exit(1)
    print(f"{part}: not run, its files are as on {last['date']}: {last['outcome']}")


@app.command()
def passed(part: Part, outcome: str) -> None:
    """Record that a part passed with the files of the last commit."""
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *PARTS[part]], cwd=ROOT)
    if changed.returncode:
        fail(f"the files of {part} differ from the last commit", "Commit them, and run it again.")
    today = datetime.now(UTC).date().isoformat()
    entry = {"date": today, "outcome": outcome, "files": files_hash(part)}
    RECORD.write_text(json.dumps(_record() | {part: entry}, indent=2, sort_keys=True) + "\n")


def _record() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}  # type: ignore[no-any-return]


if __name__ == "__main__":
    app()
