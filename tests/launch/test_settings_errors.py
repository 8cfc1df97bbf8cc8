"""Mistakes in settings: the setting, its value and the way out, and no secrets."""

from __future__ import annotations

import pytest

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings


def load(**values):
    return Settings.load({"model": "m", **values})


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(SettingsError, match="remote_password") as refused:
        load(remote_url="redis://:s3cret@cache:6379")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0; expected greater than or equal"),
        ({"port": "tcp://10.0.0.1:80"}, "enableServiceLinks: false"),
        ({"dtype": "int8"}, "dtype='int8'; expected .*bfloat16"),
        ({"chunk_token": 256}, "expected chunk_tokens instead of chunk_token"),
        ({"disk_path": "/d"}, "Set disk_gib as well"),
        ({"cpu_gib": float("inf")}, "cpu_gib=inf"),
        ({"disk_gib": 1}, "Set disk_path as well"),
        ({"chunk_tokens": 100, "block_tokens": 64}, "multiple of block_tokens. Use 128"),
        ({"chunk_tokens": 64, "device": "cpu"}, "blocks of 128 tokens; .* Use 128"),
        ({"block_tokens": 16, "device": "cpu"}, "expected a multiple of 32"),
        ({"pipeline_parallel": 2, "device": "cpu"}, "expected 1: vLLM.s CPU engine can.t"),
        ({"model": ""}, "model=''"),
    ],
)
def test_mistakes_name_the_setting_its_value_and_the_way_out(values, says):
    with pytest.raises(SettingsError, match=says):
        load(**values)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("remote_url", "redis://HOST:PORT"),
        ("server_url", "ipc:///DIRECTORY/SOCKET"),
        ("kv_events", r"tcp://\*:PORT"),
    ],
)
def test_a_bad_address_is_told_by_an_example_and_not_by_a_pattern(name, form):
    with pytest.raises(SettingsError, match=form) as refused:
        load(**{name: "localhost:6379"})
    assert "pattern" not in str(refused.value)
    assert "^" not in str(refused.value)


def test_a_missing_model_is_named():
    with pytest.raises(SettingsError, match="found no model"):
        Settings.load({})


def test_an_unknown_variable_is_a_mistake_and_not_ignored(monkeypatch):
    monkeypatch.setenv(ENV_PREFIX + "CHUNK_TOKEN", "512")
    with pytest.raises(SettingsError, match=ENV_PREFIX + "CHUNK_TOKENS"):
        load()


def test_a_bad_key_is_not_shown(monkeypatch):
    with pytest.raises(SettingsError) as caught:
        load(api_key=["s3cret"])
    assert "s3cret" not in str(caught.value)
