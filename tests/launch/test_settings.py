"""Settings: where values come from, and what they may be."""

from __future__ import annotations

import pytest

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.engine_arguments import lmcache_config
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.serve import resolve_device
from lmcache_xpu.launch.settings import Settings

# vLLM and LMCache import parts of other packages that these packages deprecate.
pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


def load(**values):
    return Settings.load({"model": "m", **values})


@pytest.mark.parametrize("values", [{"remote_url": "redis://cache:6379"}, {"tier_dtype": "fp8"}])
def test_the_shared_tier_and_fp8_are_not_for_layerwise(values):
    with pytest.raises(SettingsError, match=r"layerwise with .*one of the two"):
        load(layerwise=True, **values)


@pytest.mark.parametrize("name", ["overlap_load", "overlap_store", "hash_algorithm"])
def test_a_setting_that_is_gone_stops_a_start(name, monkeypatch):
    with pytest.raises(SettingsError, match=name):
        load(**{name: "true"})
    monkeypatch.setenv(ENV_PREFIX + name.upper(), "true")
    with pytest.raises(SettingsError, match=name.upper()):
        load()


def test_the_hash_of_names_layer_by_layer_is_one_that_vllm_knows():
    """LMCache falls back to Python's hash(), different in every process, for any other name."""
    from vllm.utils.hashing import get_hash_fn_by_name

    config = lmcache_config(load(layerwise=True))
    assert callable(get_hash_fn_by_name(config["pre_caching_hash_algorithm"]))


def test_values_win_over_variables_and_empty_variables_are_unset(monkeypatch):
    monkeypatch.setenv(ENV_PREFIX + "PORT", "9000")
    monkeypatch.setenv(ENV_PREFIX + "CHUNK_TOKENS", "512")
    monkeypatch.setenv(ENV_PREFIX + "DISK_PATH", "")
    monkeypatch.setenv(ENV_PREFIX + "EXTRA_ARGS", "--seed 3 --limit-mm-per-prompt '{\"image\": 1}'")
    settings = load(chunk_tokens=1024)
    assert (settings.port, settings.chunk_tokens, settings.disk_path) == (9000, 1024, None)
    assert settings.extra_args == ("--seed", "3", "--limit-mm-per-prompt", '{"image": 1}')


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1


def test_every_setting_says_what_it_is_in_which_unit():
    for name, field in Settings.model_fields.items():
        assert field.description, name
    assert not [n for n in Settings.model_fields if n.endswith(("_gb", "_size", "_timeout"))]


def test_the_variables_that_other_modules_read_are_known(monkeypatch):
    from lmcache_xpu import versions
    from lmcache_xpu.vllm_hooks import patches

    for name in (patches.STOCK_VARIABLE, patches.DEVICES_VARIABLE, versions.UNTESTED_VARIABLE):
        monkeypatch.setenv(name, "1")
    assert load().model == "m"


@pytest.mark.parametrize("disk_path", [None, "/d"])
def test_a_disk_tier_of_0_gib_is_none(disk_path):
    assert load(disk_gib=0, disk_path=disk_path).disk_path is None
    assert resolve_device(load(disk_gib=0, disk_path=disk_path)).disk_path is None


def test_a_load_inside_a_step_is_not_for_pipeline_parallelism():
    gpu = {"device": "xpu", "pipeline_parallel": 2}
    assert load(**gpu).loads == "auto"
    with pytest.raises(SettingsError, match="loads=step with an engine of 2 devices"):
        load(**gpu, loads="step")
