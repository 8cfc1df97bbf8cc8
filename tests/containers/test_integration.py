"""The integration tests against the engine of compose.yaml: its image, rights and entry point."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from docker_host import ROOT
from stack import tag

# One engine's worth of them: all of them take several minutes (`make integration STACK=compose`).
CHOSEN = "standard and not layers and (recomputed or tier or raises or flipped or salt or add_up)"


@pytest.mark.matrix  # minutes, and what `make integration` does in .ci/run without containers
def test_promises_are_kept_in_containers(host, images, tmp_path):
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "integration_tests", "--stack", "compose"),
            *("-k", CHOSEN, "--requests", "40", "--junitxml", str(report)),
            *("-p", "no:cacheprovider", "--basetemp", str(tmp_path / "integration")),
        ],
        cwd=ROOT,
        env={**host.env, "CPU_TAG": tag("cpu")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:]
    [suite] = ET.parse(report).getroot()
    counted = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": counted["tests"], "failures": 0, "errors": 0, "skipped": 0}
    assert counted["tests"] > 15
