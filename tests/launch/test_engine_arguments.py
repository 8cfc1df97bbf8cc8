"""Settings become vLLM's arguments and LMCache's configuration; both read by their real code."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.launch.engine_arguments import (
    engine_variables,
    lmcache_config,
    server_config,
    vllm_arguments,
)
from lmcache_xpu.launch.settings import Settings

# vLLM and LMCache import parts of other packages that these packages deprecate.
pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


def load(**values):
    return Settings.load({"model": "m", **values})


@pytest.fixture(scope="module")
def parser():
    """vLLM's own parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def test_vllm_reads_every_argument_as_it_was_meant(parser):
    settings = load(
        host="::1",
        port=8123,
        served_model_name="name",
        drain_s=30,
        dtype="bfloat16",
        max_model_len=8192,
        block_tokens=64,
        kv_cache_gib=1.5,
        memory_fraction=0.5,
        tensor_parallel=2,
        pipeline_parallel=4,
        data_parallel=3,
        prefix_caching=False,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        enforce_eager=True,
        extra_args=("--seed", "7"),
    )
    args = parser.parse_args(vllm_arguments(settings))
    arguments = {
        "model": args.model_tag,
        "host": args.host,
        "port": args.port,
        "name": args.served_model_name,
        "drain": args.shutdown_timeout,
        "dtype": args.dtype,
        "length": args.max_model_len,
        "block": args.block_size,
        "kv": args.kv_cache_memory_bytes,
        "fraction": args.gpu_memory_utilization,
        "tp": args.tensor_parallel_size,
        "pp": args.pipeline_parallel_size,
        "dp": args.data_parallel_size,
        "prefix": args.enable_prefix_caching,
        "tokens": args.max_num_batched_tokens,
        "seqs": args.max_num_seqs,
        "eager": args.enforce_eager,
        "seed": args.seed,
    }
    assert arguments == {
        "model": "m",
        "host": "::1",
        "port": 8123,
        "name": ["name"],
        "drain": 30,
        "dtype": "bfloat16",
        "length": 8192,
        "block": 64,
        "kv": 3 * 2**29,
        "fraction": 0.5,
        "tp": 2,
        "pp": 4,
        "dp": 3,
        "prefix": False,
        "tokens": 2048,
        "seqs": 4,
        "eager": True,
        "seed": 7,
    }


def test_defaults_leave_the_engines_choices_alone(parser):
    plain = parser.parse_args(["m"])
    ours = parser.parse_args(vllm_arguments(load(offload=False)))
    decided = {"host", "gpu_memory_utilization", "enable_prefix_caching"}
    decided.add("enable_prompt_tokens_details")
    changed = {k for k, v in vars(ours).items() if v != getattr(plain, k)}
    assert changed == decided


def test_answers_say_how_much_of_a_prompt_was_cached(parser):
    """Or clients such as AIPerf and the load test see no cached tokens."""
    for values, shown in (
        ({}, True),
        ({"api_key": "k"}, False),  # tenants share the cache, and the answers would tell
        ({"api_key": "k", "show_cached_tokens": True}, True),
        ({"show_cached_tokens": False}, False),
    ):
        parsed = parser.parse_args(vllm_arguments(load(**values)))
        assert parsed.enable_prompt_tokens_details is shown


def test_without_offload_there_is_no_connector_and_no_lmcache(parser):
    settings = load(offload=False, disk_path="/d", disk_gib=1)
    assert parser.parse_args(vllm_arguments(settings)).kv_transfer_config is None
    assert lmcache_config(settings) == {}


@pytest.mark.parametrize("layerwise", [False, True])
def test_one_setting_lets_routers_hear_of_all_tiers(parser, layerwise):
    settings = load(kv_events="tcp://*:5557", layerwise=layerwise)
    args = parser.parse_args(vllm_arguments(settings))
    assert args.kv_events_config.enable_kv_cache_events
    assert (args.kv_events_config.publisher, args.kv_events_config.endpoint) == (
        "zmq",
        "tcp://*:5557",
    )
    assert lmcache_config(settings).get("enable_kv_events", False) is layerwise
    off = load(layerwise=layerwise)
    assert parser.parse_args(vllm_arguments(off)).kv_events_config is None
    assert "enable_kv_events" not in lmcache_config(off)
    without_tiers = load(kv_events="tcp://*:5557", offload=False)
    assert parser.parse_args(vllm_arguments(without_tiers)).kv_events_config is not None


def test_the_cache_in_the_engines_process_is_described_in_vllms_command_line(parser):
    """The whole way: our settings, vLLM's parser and dataclass, our reader."""
    from lmcache_xpu.cache.local_options import LocalCacheOptions
    from lmcache_xpu.connector.connector import CACHE

    settings = load(
        chunk_tokens=512,
        cpu_gib=0.5,
        disk_path="/data/kv",
        disk_gib=2.5,
        save_decode=True,
        staging_mib=128,
        loads="async",
        tier_dtype="fp8",
    )
    transfer = parser.parse_args(vllm_arguments(settings)).kv_transfer_config
    assert transfer.kv_connector == "LMCacheXPUServerConnector"
    assert transfer.kv_connector_module_path == "lmcache_xpu.vllm_connector"
    assert transfer.is_kv_producer
    assert transfer.is_kv_consumer
    extra = dict(transfer.kv_connector_extra_config)
    options = LocalCacheOptions.read(extra.pop(CACHE))
    assert (options.chunk_tokens, options.cpu_gib) == (512, 0.5)
    assert options.tier_dtype == "fp8"
    assert (options.disk_path, options.disk_gib) == (Path("/data/kv"), 2.5)
    assert extra == {
        "lmcache.mp.save_decode_cache": True,
        "xpu.loads": "async",
        "xpu.staging_mib": 128,
    }
    assert lmcache_config(settings) == {}


def test_without_a_disk_tier_the_cache_has_none(parser):
    from lmcache_xpu.cache.local_options import LocalCacheOptions

    options = LocalCacheOptions.read(server_config(load())["xpu.cache"])
    assert options == LocalCacheOptions()  # the same defaults
    assert options.disk_path is None


def test_layer_by_layer_the_disk_tier_reaches_lmcache_through_vllms_command_line(parser):
    """The whole way: our settings, vLLM's parser and dataclass, LMCache's setter."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.config_base import validate_and_set_config_value

    settings = load(
        chunk_tokens=512,
        cpu_gib=0.5,
        disk_path="/data/kv",
        disk_gib=2.5,
        layerwise=True,
        save_decode=True,
        staging_mib=128,
    )
    transfer = parser.parse_args(vllm_arguments(settings)).kv_transfer_config
    assert transfer.kv_connector == "LMCacheXPUConnector"
    assert transfer.kv_connector_module_path == "lmcache_xpu.vllm_connector"
    assert transfer.is_kv_producer
    assert transfer.is_kv_consumer

    config = LMCacheEngineConfig.from_env()
    for name, value in transfer.kv_connector_extra_config.items():
        assert validate_and_set_config_value(config, name.removeprefix("lmcache."), value), name
    config.validate()
    assert config.chunk_size == 512
    assert config.local_cpu is True
    assert config.max_local_cpu_size == 0.5
    assert config.use_layerwise is True
    assert config.save_decode_cache is True
    assert config.save_unfull_chunk is False
    assert config.pre_caching_hash_algorithm == "sha256"
    assert config.storage_plugins == ["disk"]
    extra = dict(config.extra_config)
    module = importlib.import_module(extra.pop("storage_plugin.disk.module_path"))
    assert isinstance(getattr(module, extra.pop("storage_plugin.disk.class_name")), type)
    assert extra == {
        "disk.path": "/data/kv",
        "disk.gib": 2.5,
        "xpu.staging_mib": 128,
    }


def test_staging_is_what_suits_the_device_unless_a_size_is_named(monkeypatch):
    """A size that is handed on where nobody named one would hide the table's row."""
    layerwise = {"layerwise": True}
    assert "xpu.staging_mib" not in server_config(load())
    assert "xpu.staging_mib" not in lmcache_config(load(**layerwise))["extra_config"]
    monkeypatch.setenv("LMCACHE_XPU_STAGING_MIB", "128")
    assert server_config(load())["xpu.staging_mib"] == 128
    assert lmcache_config(load(**layerwise))["extra_config"]["xpu.staging_mib"] == 128


def test_the_shared_tier_can_be_with_and_without_a_disk_tier():
    alone = server_config(load(remote_url="redis://cache:6379"))["xpu.cache"]
    both = server_config(load(remote_url="rediss://cache:6379/1", disk_path="/d", disk_gib=1))
    assert alone["remote_url"] == "redis://cache:6379"
    assert "disk_path" not in alone
    assert both["xpu.cache"]["remote_url"] == "rediss://cache:6379/1"
    assert both["xpu.cache"]["disk_path"] == "/d"
    assert LocalCacheOptions.read(both["xpu.cache"]).remote_url == "rediss://cache:6379/1"
    assert "remote_url" not in server_config(load())["xpu.cache"]


def test_a_chunk_that_is_lost_is_recomputed(parser):
    """vLLM's default fails the request."""
    transfer = parser.parse_args(vllm_arguments(load())).kv_transfer_config
    assert transfer.kv_load_failure_policy == "recompute"


def test_cpu_never_lets_vllm_take_nearly_all_memory(parser):
    args = parser.parse_args(vllm_arguments(load(device="cpu")))
    assert args.kv_cache_memory_bytes == 4 * 2**30
    args = parser.parse_args(vllm_arguments(load(device="cpu", kv_cache_gib=0.25)))
    assert args.kv_cache_memory_bytes == 2**28


def test_a_key_is_never_an_argument_and_never_shown():
    settings = load(api_key="s3cret")
    assert engine_variables(settings)["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in " ".join(vllm_arguments(settings))
    assert "s3cret" not in repr(settings)


def test_the_switches_that_stop_reporting_are_the_ones_both_obey(monkeypatch):
    from lmcache.usage_telemetry import identity
    from vllm import envs

    for name, value in engine_variables(load()).items():
        monkeypatch.setenv(name, value)
    assert envs.VLLM_DO_NOT_TRACK
    checks = [f for n, f in vars(identity).items() if "track" in n.lower() and callable(f)]
    assert checks
    assert not any(check() for check in checks)


def test_on_cpu_onednn_keeps_nothing():
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    assert engine_variables(load(device="cpu"))[name] == "0"
    assert name not in engine_variables(load(device="xpu"))


def test_the_command_line_is_one_line_of_json_and_plain_words():
    args = vllm_arguments(load(disk_path=Path("/d"), disk_gib=1))
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["xpu.cache"]["disk_gib"] == 1.0
    assert "\n" not in " ".join(args)


def test_the_allocator_of_an_intel_gpu_is_told_to_pin_no_more_than_it_is_asked_for(monkeypatch):
    """What is set already is kept, and added to."""
    name, ours = "PYTORCH_ALLOC_CONF", "pinned_max_cached_size_mb:1024"
    monkeypatch.setenv(name, "expandable_segments:True")
    assert engine_variables(load(device="xpu"))[name] == f"expandable_segments:True,{ours}"
    assert engine_variables(load(device="xpu"), {})[name] == ours
    assert name not in engine_variables(load(device="xpu"), {name: "pinned_max_cached_size_mb:64"})
    assert name not in engine_variables(load(device="xpu", offload=False), {})
    assert name not in engine_variables(load(device="cpu"), {})


def test_vllms_own_offloading_gets_the_disk_tier_behind_it(parser):
    settings = load(
        device="xpu", cache="vllm", cpu_gib=8, disk_path="/cache", disk_gib=32, tensor_parallel=2
    )
    arguments = vllm_arguments(settings)
    args = parser.parse_args(arguments)
    assert args.kv_transfer_config.kv_connector == "OffloadingConnector"
    assert "--scheduler-cls" not in arguments
    extra = args.kv_transfer_config.kv_connector_extra_config
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 16 * 2**30  # of both devices
    [tier] = extra["secondary_tiers"]
    module = importlib.import_module(tier["module_path"])
    assert hasattr(module, tier["type"])
    assert (tier["path"], tier["gib"]) == ("/cache", 64)


def test_vllms_own_offloading_without_a_disk_is_host_memory_alone():
    config = json.loads(_option(load(device="xpu", cache="vllm"), "--kv-transfer-config"))
    assert config["kv_connector_extra_config"]["secondary_tiers"] == []


def _option(settings: Settings, name: str) -> str:
    arguments = vllm_arguments(settings)
    return arguments[arguments.index(name) + 1]
