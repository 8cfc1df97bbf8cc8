"""The comparison's command, with stub servers for variants, and what variants are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from math import gcd
from pathlib import Path

import pytest
from stub_process import stub_server

from lmcache_xpu.harness.random_model import DEMO
from loadtests.servers import Compose
from loadtests.variants import PROFILES, VARIANTS, settings_of

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
SHORT_RUN = ["--option=--duration-s=6", "--option=--qps=8", "--option=--warm-up=0"]


def compare(*arguments, tmp_path):
    command = [sys.executable, "-m", "loadtests.compare", "--profile", "short"]
    where = ["--report-dir", str(tmp_path / "report"), "--work", str(tmp_path / "work")]
    return subprocess.Popen(
        [*command, *where, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_given_servers_are_compared_and_judged(tmp_path):
    slo = tmp_path / "slo.toml"
    slo.write_text(
        '[goodput]\nttft_s=1\nitl_s=1\n[[compare]]\nvariant="cpu"\nfigure="ttft_p50_ratio"\nmin=2'
    )
    with stub_server("--first-ms", "200") as slow, stub_server("--first-ms", "20") as fast:
        urls = ["--url", f"none={slow.url}", "--url", f"cpu={fast.url}"]
        process = compare(*urls, "--slo", str(slo), *SHORT_RUN, tmp_path=tmp_path)
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0, said
        asked = [
            {body["id"]: body["messages"] for body in server.read("bodies") if body["id"]}
            for server in (slow, fast)
        ]
    same = asked[0].keys() & asked[1].keys()
    assert len(same) > 10
    assert all(asked[0][key] == asked[1][key] for key in same)  # to the letter, answers too
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert 5 < summary["variants"]["cpu"]["ttft_p50_ratio"] < 11
    assert said.replace("\n", " ").count("YES: CPU tier. First tokens come") == 1
    assert summary["facts"]["command"].startswith("make loadtest-compare PROFILE=short 'ARGS=")
    assert f"--url none={slow.url}" in summary["facts"]["command"]
    assert summary["facts"]["servers' vLLM"] == {"none": "not said", "cpu": "not said"}
    assert (tmp_path / "report" / "rows" / "cpu-1" / "rows.jsonl").exists()
    again = compare("--again", str(tmp_path / "report"), "--slo", str(slo), tmp_path=tmp_path)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert json.loads((tmp_path / "report" / "summary.json").read_text()) == summary


def test_an_interrupted_comparison_reports_what_it_has(stub, tmp_path):
    urls = ["--url", f"none={stub.url}", "--url", f"cpu={stub.url}"]
    process = compare(*urls, *SHORT_RUN, "--option=--duration-s=6", tmp_path=tmp_path)
    second = tmp_path / "report" / "rows" / "cpu-1" / "rows.jsonl"
    deadline = time.monotonic() + 60
    while not second.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "interrupted" in said
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["variants"].keys() == {"none"}
    assert summary["facts"]["cut short"] == "interrupted"


def test_a_run_that_does_not_begin_says_why(stub, tmp_path):
    wrong = ["--option=--tags=nonsense"]
    process = compare("--url", f"none={stub.url}", *wrong, tmp_path=tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "run none-1 did not begin: found --tags" in said
    assert "nothing was measured" in said


def test_an_option_that_locust_does_not_have_is_named(stub, tmp_path):
    process = compare("--url", f"none={stub.url}", "--option=--qpz=3", tmp_path=tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "run none-1 did not begin: unrecognized arguments: --qpz" in said


def test_a_restart_needs_somebody_who_restarts(stub, tmp_path):
    urls = ["--url", f"none={stub.url}", "--url", f"disk={stub.url}"]
    process = compare(*urls, tmp_path=tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "which needs a restart" in said


def test_the_report_of_one_server_is_written_again(stub, tmp_path):
    directory = tmp_path / "one"
    options = {"--host": stub.url, "--report-dir": directory, "--duration-s": 4, "--qps": 4}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    short = ["--users=4", "--answer-len=4", "--warm-up=0"]
    done = subprocess.run([*command, *words, *short], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    (directory / "report.html").unlink()
    again = compare("--again", str(directory), tmp_path=tmp_path)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert said.splitlines()[-1].startswith("YES: the tiers serve this load.")
    assert (directory / "report.html").exists()


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_hold_what_they_promise(name):
    """By words, of which the demo's tokenizer makes at least one token each."""
    profile = PROFILES[name]
    tokens = profile.shared_words + profile.history_words
    assert profile.users * tokens >= 4 * profile.engine_tokens
    assert gcd(profile.users, profile.rounds - 1) == 1
    assert profile.engine_tokens >= profile.max_model_len


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_differ_only_in_where_the_kv_cache_goes(name, tmp_path):
    made = settings_of(
        VARIANTS[name], PROFILES["long"], model=tmp_path, disk=tmp_path / "disk", port=1
    )
    assert made.prefix_caching
    assert made.offload == (name != "none")
    assert made.layerwise == (name == "layerwise")
    assert (made.disk_path is not None) == (name in ("disk", "none"))
    assert made.kv_cache_gib * 2**30 == 5120 * DEMO.kv_bytes_per_token


def test_a_compose_service_gets_the_variants_settings(tmp_path):
    compose = Compose(tmp_path / "c.yaml", service="engine-xpu", url="http://x", work=tmp_path)
    environment = {
        name: compose.override(VARIANTS[name])["services"]["engine-xpu"]["environment"]
        for name in VARIANTS
    }
    # On CPU all variants compute on the same number of cores.
    assert {each.pop("VLLM_CPU_NUM_OF_RESERVED_CPU") for each in environment.values()} == {"0"}
    assert environment == {
        "none": {"LMCACHE_XPU_OFFLOAD": "false"},
        "cpu": {"LMCACHE_XPU_DISK_PATH": "", "LMCACHE_XPU_DISK_GIB": ""},
        "disk": {},
        "layerwise": {
            "LMCACHE_XPU_DISK_PATH": "",
            "LMCACHE_XPU_DISK_GIB": "",
            "LMCACHE_XPU_LAYERWISE": "true",
        },
    }
