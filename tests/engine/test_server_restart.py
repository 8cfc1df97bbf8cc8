"""Engines of one LMCache server that come after each other, and a server that is started again."""

from __future__ import annotations

import threading
import time

import pytest
from support.cache_server import CacheServer
from support.real_engine import LENGTHS, cached, is_exact
from support.scripts import environment, printed, run_probe

pytestmark = pytest.mark.engine


def test_what_one_engine_stores_another_one_finds(model, directory):
    """The first is there before the server, and waits for it; both have their own hash seeds."""
    server = CacheServer(directory / "two.log")
    starting = threading.Timer(15, server.start)
    starting.start()
    try:
        place = (model, directory, server.url)
        steps = {
            "store": printed(run_probe("server", "store", *place)),
            "find": printed(run_probe("server", "find", *place, env=environment())),
        }
    finally:
        starting.join()
        server.kill()
    assert set(steps["store"].values()) == {0}
    for name in LENGTHS:
        assert steps["find"][name]["hit"] == cached(name)
        assert is_exact(steps["find"][name], name)
    # With a scheduler of somebody else's, requests wait for their loads, whatever is asked for.
    assert steps["find"]["ways"] == {"step": 0, "async": len(LENGTHS), "computed": 0}


def test_what_is_on_disk_outlives_its_server(model, directory):
    server = CacheServer(directory / "disk.log", disk_path=directory / "disk", disk_gib=1)
    server.start()
    try:
        printed(run_probe("server", "store", model, directory, server.url))
        time.sleep(3)  # what is stored gets to the disk in the background
        server.kill()
        server.start()
        find = ("server", "find", model, directory, server.url)
        asked = printed(run_probe(*find, env=environment()))
    finally:
        server.kill()
    for name in LENGTHS:
        assert asked[name]["hit"] == cached(name)
        assert is_exact(asked[name], name)
