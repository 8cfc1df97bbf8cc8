"""It starts or says why not; test_8_other_engines.py has how it stops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack import PATHS, Processes, Stack

from lmcache_xpu import doctor
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings

pytestmark = pytest.mark.promise("6 start and stop")


# A wrong value for each setting that has one; the others take any text. A new setting has no value
# here, so that its test fails until it gets one.
WRONG = {
    "port": "99999",
    "drain_s": "-1",
    "log_level": "loud",
    "device": "tpu",
    "dtype": "int4",
    "max_model_len": "0",
    "block_tokens": "x",
    "kv_cache_gib": "0",
    "memory_fraction": "1.5",
    "tensor_parallel": "0",
    "pipeline_parallel": "0",
    "prefix_caching": "perhaps",
    "show_cached_tokens": "sometimes",
    "max_num_batched_tokens": "-5",
    "max_num_seqs": "0",
    "enforce_eager": "maybe",
    "offload": "some",
    "chunk_tokens": "0",
    "cpu_gib": "nan",
    "disk_gib": "-1",
    "remote_url": "http://cache:6379",
    "layerwise": "2",
    "save_decode": "no way",
    "kv_events": "http://router:5557",
    "data_parallel": "0",
    "loads": "sometimes",
    "staging_mib": "-1",
    "cache": "elsewhere",
    "tier_dtype": "int3",
    "server_url": "127.0.0.1:5555",
    "server_timeout_s": "0",
}
ANY_TEXT = {
    "model",
    "host",
    "api_key",
    "served_model_name",
    "disk_path",
    "remote_password",
    "extra_args",
}


@pytest.mark.fails_without("settings")
@pytest.mark.parametrize("name", sorted(Settings.model_fields.keys() - ANY_TEXT))
def test_a_wrong_value_is_refused_by_name(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """Key, value and what is allowed, in one line, before anything has started.

    Seen to fail with settings that nobody checks.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    if part := request.config.getoption("--break"):
        env |= {"HOOKS_DIRECTORY": str(tmp_path), "HOOKS_BREAK": part}
    env["PYTHONPATH"] = PATHS
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lmcache-xpu")), "serve", "org/model", "--dry-run"],
        env={**env, ENV_PREFIX + name.upper(): WRONG[name]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert name in done.stderr
    assert "expected" in done.stderr
    assert WRONG[name] in done.stderr or "not shown" in done.stderr


@pytest.mark.fails_without("preflight")
def test_more_memory_than_there_is_is_refused(
    stack: Stack, model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """By `serve`, before anything has started. Seen to fail without a look at the machine."""
    if not isinstance(stack, Processes):
        pytest.skip("processes only; tests/containers/test_mistakes.py has it for compose.yaml")
    if request.config.getoption("--break"):
        monkeypatch.setattr(doctor, "_quick_checks", lambda *_: [])
    with pytest.raises(SettingsError, match=r"1e\+06 GiB"):
        doctor.check_start(Settings(model=str(model), device="cpu", cpu_gib=1e6))
