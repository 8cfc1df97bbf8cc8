"""What `serve` and the harness check before an engine starts."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest
from support.scripts import run_script

from lmcache_xpu.doctor import check_start, memory
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch import serve as module
from lmcache_xpu.launch.engine_arguments import engine_variables
from lmcache_xpu.launch.machine import Machine
from lmcache_xpu.launch.preflight import check_directory, preflight
from lmcache_xpu.launch.serve import serve
from lmcache_xpu.launch.settings import Settings


def load(**values):
    return Settings.load({"model": "org/model", **values})


def test_a_port_in_use_is_named(free):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free))
        taken.listen()
        with pytest.raises(SettingsError, match=f"127.0.0.1:{free} not available .*in use"):
            preflight(load(port=free), {})
    preflight(load(port=free), {})


def test_a_foreign_address_is_named(free):
    with pytest.raises(SettingsError, match=r"203\.0\.113\.1:\d+ not available"):
        preflight(load(host="203.0.113.1", port=free), {})


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such", "~/no-such"])
def test_a_path_without_a_model_is_told_from_a_name(model, free):
    with pytest.raises(SettingsError, match=r"a config\.json"):
        preflight(load(model=model, port=free), {})
    preflight(load(model="org/no-such", port=free), {})


def test_a_directory_that_is_no_model_is_named(tmp_path, free):
    with pytest.raises(SettingsError, match=f"model={tmp_path}"):
        preflight(load(model=str(tmp_path), port=free), {})
    (tmp_path / "config.json").touch()
    preflight(load(model=str(tmp_path), port=free), {})


@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
def test_a_model_of_states_alone_is_refused_before_vllm_starts(kind: str, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(SettingsError, match=rf"linear_attention.* in a {kind}.*--no-offload"):
        serve(load(model=str(tmp_path)), lambda _: None)


CACHED = """
import json
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.model_support import check_layers
from lmcache_xpu.launch.settings import Settings
try:
    check_layers(Settings.load({"model": "org/model"}))
    refused = None
except SettingsError as error:
    refused = str(error)
print(json.dumps({"refused": refused}))
"""


def test_of_a_hub_s_model_the_downloaded_configuration_counts(tmp_path):
    """No hub is asked: there is none here."""
    assert run_script(CACHED, HF_HOME=str(tmp_path))["refused"] is None
    kept = tmp_path / "hub/models--org--model"
    (kept / "snapshots/c0ffee").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("c0ffee")
    (kept / "snapshots/c0ffee/config.json").write_text('{"model_type": "mamba2"}')
    assert "linear_attention" in run_script(CACHED, HF_HOME=str(tmp_path))["refused"]


def test_a_disk_path_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"disk_path .*can't be written"):
        check_directory(tmp_path / "file", "disk_path")


def test_a_disk_path_is_made_and_left_empty(tmp_path):
    check_directory(tmp_path / "a" / "b", "disk_path")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    class Full:
        def __init__(self, **_):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", Full)
    with pytest.raises(SettingsError, match="No space left"):
        check_directory(tmp_path, "disk_path")


@pytest.fixture
def nowhere(tmp_path, free):
    """Addresses at which no server of LMCache listens: how each is said, by its URL."""
    tmp_path.chmod(0o700)
    no_directory = f"ipc://{tmp_path}/none/server.sock"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = (f"tcp://127.0.0.1:{free}", f"ipc://{tmp_path}/server.sock")
        urls += (f"tcp://127.0.0.1:{silent.getsockname()[1]}",)
        answers = {url: f"no answer from an LMCache server at {url}" for url in urls}
        yield answers | {no_directory: f"LMCache's server at {no_directory} (No such file"}


def test_a_server_that_is_not_there_is_refused_before_anything_slow(nowhere, free, monkeypatch):
    """By `serve`, its dry run and doctor alike, in one line that says what to do."""
    monkeypatch.setattr(module, "check_layers", lambda _: pytest.fail("a model was read"))
    for url, words in nowhere.items():
        settings = load(port=free, cache="server", server_url=url)
        begun = time.monotonic()
        for start in (
            lambda settings=settings: serve(settings, check_start),
            lambda settings=settings: serve(settings, pytest.fail, dry_run=True),
        ):
            with pytest.raises(SettingsError, match=re.escape(words)) as refusal:
                start()
            assert "Start " in refusal.value.fix
            assert "\n" not in str(refusal.value)
        assert time.monotonic() - begun < 2 * 2
        check = memory.check_memory(Machine(), settings)
        assert (check.outcome, check.name) == ("fail", "LMCache's server")
        assert words in check.found
        assert check.advice == refusal.value.fix


@pytest.mark.parametrize(
    "name", ["VLLM_CPU_KVCACHE_SPACE", "LMCACHE_CHUNK_SIZE", "LMCACHE_MAX_LOCAL_CPU_SIZE"]
)
def test_a_second_way_to_set_the_same_is_refused(name, free):
    """vLLM would follow the first and LMCache ignore the second, both in silence."""
    with pytest.raises(SettingsError, match=f"{name}=8 .* Unset {name}"):
        preflight(load(port=free), {name: "8"})


def test_our_environment_is_not_a_second_way(free):
    preflight(load(port=free), engine_variables(load()))
