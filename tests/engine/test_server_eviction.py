"""What LMCache's server forgets first: the end of a prompt, also of one stored in several steps."""

from __future__ import annotations

import pytest
from support.lmcache_server import Client, Server
from support.until import until

pytestmark = pytest.mark.engine

OLD, NEW = 40, 16  # chunks; of 64 the server frees a fifth when four fifths are in use


@pytest.mark.parametrize("step", [4, OLD])
def test_a_prompt_loses_its_end_first(tmp_path, step):
    server = Server(tmp_path / "log")
    server.start()
    try:
        client = Client(server)
        client.compute(1, OLD, step)
        client.compute(2, NEW, step)
        until(lambda: server.l1["total_object_count"] < OLD + NEW)
        kept = server.l1["total_object_count"]
        assert NEW < kept < OLD + NEW
        assert client.hit(2, NEW) == NEW
        assert client.hit(1, OLD) == kept - NEW
        client.close()
    finally:
        server.stop()
