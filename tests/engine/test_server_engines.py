"""Two engines on one LMCache server at the same moment, one of which is killed in a store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cache_server import CacheServer
from support.real_engine import BLOCK, CHUNK
from support.scripts import environment, printed
from support.two_engines_probe import LAST, OWN, SHARED

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = [pytest.mark.engine, pytest.mark.alone]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("engines")
    model = make_model(EXACT, directory)
    server = CacheServer(directory / "server.log")
    server.start()
    engines = [start(model, directory, server.url, number) for number in range(2)]
    try:
        wait_for(directory / "storing", engines)
        engines[0].kill()
        (directory / "killed").touch()
        out, err = engines[1].communicate(timeout=200)
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
        server.kill()
    second = printed(subprocess.CompletedProcess([], engines[1].returncode, out, err))
    return {"first": json.loads((directory / "report").read_text()), "second": second}


def start(model: Path, directory: Path, url: str, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "support.two_engines_probe", model, directory, url, str(number)],
        env=environment(VLLM_CPU_OMP_THREADS_BIND=str(number), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE if number else subprocess.DEVNULL,
        stderr=subprocess.PIPE if number else subprocess.DEVNULL,
        text=True,
    )


def wait_for(path: Path, engines: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < end
        assert [engine.poll() for engine in engines] == [None, None]
        time.sleep(0.05)


def is_exact(asked: dict) -> bool:
    return asked["same"] and asked["restored"] >= asked["length"] // CHUNK * CHUNK // BLOCK


@pytest.mark.parametrize("engine", ["first", "second"])
def test_what_both_store_and_hit_at_once_is_exact(seen, engine):
    rounds = seen[engine]["rounds"]
    assert all(is_exact(asked) for asked in rounds)
    whole = {length: length // CHUNK * CHUNK for length in SHARED}
    hit = {asked["length"]: asked["hit"] for asked in rounds if asked["length"] in whole}
    assert hit == whole


def test_each_stores_prompts_that_the_other_has_not(seen):
    for engine, own in zip(("first", "second"), OWN, strict=True):
        turns = [asked for asked in seen[engine]["rounds"] if asked["length"] in own]
        assert [asked["hit"] for asked in turns][:2] == [0, 0]
        assert turns[-1]["hit"] == turns[-1]["length"] // CHUNK * CHUNK


def test_an_engine_that_is_killed_in_a_store_costs_the_other_no_byte_and_no_hit(seen):
    second = seen["second"]
    after = second["rounds"][second["before"] :]
    assert all(is_exact(asked) for asked in after)
    kept = [asked for asked in after if asked["length"] != LAST]
    assert [asked["hit"] for asked in kept] == [asked["length"] // CHUNK * CHUNK for asked in kept]
    assert second["last"][-1]["hit"] == LAST // CHUNK * CHUNK  # stored by the one that lives
