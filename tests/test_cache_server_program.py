"""docker/cache-server starts the server that `serve --cache server` starts, with a disk tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cache_server_program import by_name, disk, options, run_program

from lmcache_xpu.launch.cache_server import POOL_PREFIX, PROGRAM, server_command
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers import disk_option

WHERE = {"socket", "pages", "--shm-name"}


def test_its_options_are_those_of_serve_but_for_where_it_listens(tmp_path):
    sizes = {"cpu_gib": 3, "chunk_tokens": 512, "disk_path": "/kv", "disk_gib": 9}
    settings = Settings.load({"model": "m", "cache": "server", **sizes})
    words = server_command(settings, Path("/s/sock"))[len(PROGRAM) + 2 :]
    environ = {"CACHE_GIB": "3", "CACHE_CHUNK_TOKENS": "512"}
    environ |= {"CACHE_DISK_PATH": "/kv", "CACHE_DISK_GIB": "9"}
    ours = options(tmp_path, environ)
    expected = by_name(words)
    assert float(ours.pop("--l1-size-gb")) == float(expected.pop("--l1-size-gb")) == 3
    assert json.loads(ours.pop("--l2-adapter")) == json.loads(expected.pop("--l2-adapter"))
    assert {k: v for k, v in ours.items() if k not in WHERE} == {
        k: v for k, v in expected.items() if k not in WHERE
    }
    assert ours["--shm-name"]  # without, it lends no memory
    assert ours["socket"] == "/dev/shm/lmcache-xpu/server.sock"
    assert ours["pages"] == "127.0.0.1:5556"


@pytest.mark.parametrize("gib", ["", "0"])
def test_without_a_size_it_has_no_disk_tier(tmp_path, gib):
    assert disk(options(tmp_path, {"CACHE_GIB": "1", "CACHE_DISK_GIB": gib})) is None


def test_its_disk_tier_is_that_of_the_package(tmp_path):
    named = options(
        tmp_path, {"CACHE_GIB": "1", "CACHE_DISK_GIB": "2.5", "CACHE_DISK_PATH": "/a b/kv"}
    )
    assert disk(named) == json.loads(disk_option(Path("/a b/kv"), 2.5))
    assert named["--l2-prefetch-policy"] == "retain"


@pytest.mark.parametrize("gib", ["", "16Gi", "lots"])
def test_a_wrong_size_ends_it_with_one_line(tmp_path, gib):
    done = run_program(tmp_path, {"CACHE_GIB": gib})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "expected the memory to lend, a number of GiB" in done.stderr


def test_what_a_server_left_that_crashed_is_taken_away_first(tmp_path):
    left = Path("/dev/shm") / f"{POOL_PREFIX}lmcache-xpu-server"
    left.write_bytes(bytes(100))
    done = run_program(tmp_path, {"CACHE_GIB": "1"})
    assert done.returncode == 0
    assert not left.exists()
