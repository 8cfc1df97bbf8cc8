"""`loadtest-compare --compose`: the stack's own engine, made anew for each variant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from docker_host import ROOT

from lmcache_xpu.harness.random_model import DEMO, make_model
from loadtests.variants import PROFILES

ENGINE = "engine-cpu"
PROFILE = PROFILES["short"]
SLO = """
[goodput]
ttft_s = 2.0
itl_s = 0.2

[[compare]]
figure = "failure_rate"
max = 0

[[compare]]
variant = "disk"
figure = "ttft_p50_ratio"
min = 1.5

[[compare]]
variant = "disk"
figure = "external_hit_rate"
min = 0.5
"""


@pytest.fixture(scope="module")
def stack(make_stack, model):
    """Settings of the profile; the model is the one that takes some computing."""
    demo = make_model(DEMO, model.parent)
    return make_stack(
        LMCACHE_XPU_MODEL=f"/models/{demo.name}",
        LMCACHE_XPU_DTYPE=DEMO.dtype,
        LMCACHE_XPU_MAX_MODEL_LEN=str(PROFILE.max_model_len),
        LMCACHE_XPU_KV_CACHE_GIB=str(PROFILE.engine_tokens * DEMO.kv_bytes_per_token / 2**30),
        LMCACHE_XPU_CPU_GIB="1",
        LMCACHE_XPU_DISK_GIB="2",
        LMCACHE_XPU_ENFORCE_EAGER="true",
    )


def compare(stack, directory, *options: str):
    return subprocess.run(
        [
            *(sys.executable, "-m", "loadtests.compare", "--profile", "short"),
            *("--compose", str(stack.folder / "compose.yaml"), "--service", ENGINE),
            *("--compose-url", stack.url(), "--work", str(directory)),
            *("--report-dir", str(directory / "report"), *options),
        ],
        cwd=ROOT,
        env=stack.host.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.mark.matrix  # minutes, and what `make loadtest-compare` does in .ci/run without containers
def test_a_disk_tier_that_a_new_engine_finds(stack, tmp_path):
    """Without offload, then with a disk tier that one engine fills and the next one reads."""
    (slo := tmp_path / "slo.toml").write_text(SLO)
    # Long enough for twenty requests of later rounds, also after the restart.
    order = ("--order", "none,disk", "--option=--duration-s=48")
    done = compare(stack, tmp_path, *order, "--slo", str(slo))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads((tmp_path / "report/summary.json").read_text())
    assert set(summary["variants"]) == {"none", "disk"}
    assert summary["holds"]
    assert stack.compose("ps", "-q").stdout.strip() == ""


def test_an_engine_that_does_not_start_is_said(stack, tmp_path):
    """The service ends with what it found wrong; nothing is measured, and it says where to look."""
    broken = "LMCACHE_XPU_CPU_GIB=100000\n"
    env = stack.folder / ".env"
    before = env.read_text()
    env.write_text(before + broken)
    try:
        done = compare(stack, tmp_path, "--order", "cpu")
    finally:
        env.write_text(before)
    assert done.returncode == 2
    assert f"docker compose logs {ENGINE}" in done.stdout
    assert "Traceback" not in done.stdout
