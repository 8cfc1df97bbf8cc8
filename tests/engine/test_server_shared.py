"""The shared tier in LMCache's server as `serve` starts it: two servers, and a client of each."""

from __future__ import annotations

import pytest
from support.scripts import run_script
from support.servers import Server, needs_server

pytestmark = [pytest.mark.engine, needs_server]

SCRIPT = """
import contextlib, io, json, os, time, types
from pathlib import Path
import redis
from support.lmcache_server import CHUNK, CHUNK_TOKENS, Client
from support.servers import PASSWORD
from lmcache_xpu.launch.cache_server import start_server
from lmcache_xpu.launch.settings import Settings

port = int(os.environ["SERVER_PORT"])
values = {
    "model": "m", "device": "cpu", "cache": "server", "cpu_gib": 64 * CHUNK / 2**30,
    "chunk_tokens": CHUNK_TOKENS, "remote_url": f"redis://127.0.0.1:{port}",
    "remote_password": PASSWORD,
}
with contextlib.redirect_stdout(io.StringIO()):
    urls = [start_server(Settings.load(values)) for _ in range(2)]
first, second = (Client(types.SimpleNamespace(address=url)) for url in urls)
server = redis.Redis(port=port, password=PASSWORD)
seen = {"before": second.hit(1, 4), "new": first.store(1, 4)}
end = time.monotonic() + 20
while server.dbsize() < 4 and time.monotonic() < end:
    time.sleep(0.05)
seen["after"] = second.hit(1, 6)
directories = [url.removeprefix("ipc://").rpartition("/")[0] for url in urls]
mine = [
    p for p in Path("/proc").glob("[0-9]*")
    if any(directory in (p / "cmdline").read_text() for directory in directories)
]
seen["processes"] = len(mine)
seen["shown"] = [p.name for p in mine if PASSWORD in (p / "cmdline").read_text()]
print(json.dumps(seen))
"""


def test_servers_share_what_their_engines_stored_and_show_no_password():
    server = Server()
    server.start()
    try:
        assert run_script(SCRIPT, SERVER_PORT=str(server.port)) == {
            "before": 0,
            "new": 4,
            "after": 4,
            "processes": 4,
            "shown": [],
        }
    finally:
        server.stop()
        server.client.close()
