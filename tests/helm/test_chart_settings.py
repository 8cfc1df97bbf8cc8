"""What a rendered pod runs is what vLLM and LMCache read: both by their real code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chart import CI_FILES, container, environment, model, render, settings, shapes

from lmcache_xpu.launch.engine_arguments import vllm_arguments
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings

# vLLM and LMCache import parts of other packages that these packages deprecate.
pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


@pytest.fixture(scope="module")
def parser():
    """vLLM's own parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_vllm_and_the_connector_read_every_shape(path, parser, monkeypatch):
    from lmcache_xpu.cache.local_options import LocalCacheOptions

    objects = shapes()[path.name.removesuffix("-values.yaml")]
    for workload in objects.engines().values():
        loaded = settings(objects, workload, monkeypatch)
        args = parser.parse_args(vllm_arguments(loaded))
        assert args.model_tag == loaded.model
        assert (args.host, args.port) == ("0.0.0.0", 8000)
        assert args.shutdown_timeout == 60
        assert args.enable_prefix_caching is True
        extra = args.kv_transfer_config.kv_connector_extra_config
        if loaded.layerwise:  # LMCache's own engine, by LMCache's names
            assert extra["lmcache.max_local_cpu_size"] == loaded.cpu_gib
            assert extra["lmcache.extra_config"]["disk.path"] == str(loaded.disk_path)
            continue
        if loaded.is_server:  # LMCache's own is read by the server
            assert extra["lmcache.mp.server_urls"] == loaded.server_url
            continue
        options = LocalCacheOptions.read(extra["xpu.cache"])
        assert (options.chunk_tokens, options.cpu_gib) == (loaded.chunk_tokens, loaded.cpu_gib)
        assert (options.disk_path, options.disk_gib) == (loaded.disk_path, loaded.disk_gib)


def test_every_setting_reaches_the_process_as_it_was_given(monkeypatch):
    values = {
        "served_model_name": "a name with spaces",
        "drain_s": 7,
        "log_level": "debug",
        "device": "xpu",
        "dtype": "bfloat16",
        "max_model_len": 1048576,
        "block_tokens": 64,
        "kv_cache_gib": 1.25,
        "memory_fraction": 0.85,
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
        "prefix_caching": False,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 0x100,
        "enforce_eager": True,
        "chunk_tokens": 512,
        "cpu_gib": 0.5,
        "disk_gib": 1234.5,
        "remote_url": "redis://cache:6379/2",
        "save_decode": True,
        "extra_args": ["--seed", "7", "--chat-template", 'it\'s "so"; $(rm -rf /)\\n'],
    }
    objects = render(
        networkPolicy={"enabled": False},  # it would want a rule for the server
        models={"m": {"settings": {"model": "org/model", **values}}},
    )
    loaded = settings(objects, objects.engines()["m"], monkeypatch)
    for name, value in values.items():
        want = tuple(value) if isinstance(value, list) else value
        assert getattr(loaded, name) == want, name
    off = model(settings={"offload": False, "layerwise": True, "host": "::"})
    loaded = settings(off, off.engines()["m"], monkeypatch)
    assert (loaded.offload, loaded.layerwise, loaded.host) == (False, True, "::")


def test_every_switch_and_number_can_be_changed(monkeypatch):
    """Also those that are newer than this test."""
    from chart_schema import settings_schema

    for name in settings_schema()["properties"]:
        default = Settings.model_fields[name].default
        if isinstance(default, bool | int):
            value = (not default) if isinstance(default, bool) else default + 1
            objects = model(settings={name: value})
            assert getattr(settings(objects, objects.engines()["m"], monkeypatch), name) == value


def test_the_chart_sets_what_depends_on_it(monkeypatch):
    objects = model(settings={"disk_gib": 10}, gpu={"kind": "none"})
    loaded = settings(objects, objects.engines()["m"], monkeypatch)
    assert loaded.device == "cpu"
    mounts = container(objects.engines()["m"])["volumeMounts"]
    assert str(loaded.disk_path).startswith(
        next(mount["mountPath"] for mount in mounts if mount["name"] == "kv") + "/"
    )
    loaded = settings(plain := model(), plain.engines()["m"], monkeypatch)
    assert (loaded.device, loaded.disk_path) == ("xpu", None)


@pytest.mark.parametrize(("disk_gib", "has_tier"), [(None, False), (0, False), (50, True)])
def test_without_a_size_there_is_no_disk_tier(monkeypatch, disk_gib, has_tier):
    """Compose agrees: tests/test_stack_files.py."""
    objects = model(settings={"disk_gib": disk_gib})
    loaded = settings(objects, objects.engines()["m"], monkeypatch)
    assert (loaded.disk_path is not None) is has_tier
    mounts = container(objects.engines()["m"])["volumeMounts"]
    assert ("kv" in {mount["name"] for mount in mounts}) is has_tier


def test_secrets_are_references():
    secret = {"name": "s", "key": "k"}
    keys = {
        "apiKeySecret": secret,
        "remotePasswordSecret": secret,
        "files": {"tokenSecret": secret},
        "settings": {"remote_url": "redis://cache:6379"},
    }
    objects = render(networkPolicy={"extraEgress": [{}]}, models={"m": keys})
    variables = environment(objects.engines()["m"])
    for name in ("LMCACHE_XPU_API_KEY", "LMCACHE_XPU_REMOTE_PASSWORD", "HF_TOKEN"):
        assert variables[name] == "(secret s/k)"
    names = {name for name, value in environment(model().engines()["m"]).items()}
    assert not names & {"LMCACHE_XPU_API_KEY", "LMCACHE_XPU_REMOTE_PASSWORD", "HF_TOKEN"}


def test_the_command_of_the_cpu_pod_is_one_that_the_program_takes(tmp_path):
    """As a process, with the pod's variables; the model's name is the pod's own."""
    objects = shapes()["cpu"]
    workload = objects.engines()["small"]
    engine = container(workload)
    program = Path(sys.executable).with_name(engine["command"][0])
    done = subprocess.run(
        [program, *engine["command"][1:], *engine["args"], "--dry-run"],
        env={"PATH": os.environ["PATH"], **environment(workload)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--port 8000" in done.stdout
    assert "--max-model-len 8192" in done.stdout
    assert '"cpu_gib": 4.0' in done.stdout


def test_variables_of_the_pod_are_settings_or_not_ours():
    """Our own prefix with a name that is no setting would stop the start."""
    for objects in shapes().values():
        for workload in objects.engines().values():
            fields = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
            ours = [n for n in environment(workload) if n.startswith(ENV_PREFIX)]
            assert set(ours) <= fields
