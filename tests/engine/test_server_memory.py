"""A server whose memory fits `/dev/shm` once lends it again after it was killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.scripts import environment, printed

pytestmark = pytest.mark.engine

ROOM = 150  # MiB; the server has 0.1 GiB


def test_a_killed_server_has_room_for_its_memory_though_a_worker_maps_the_old(tmp_path):
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={ROOM}m none /dev/shm && exec "$@"'
    probe = [sys.executable, "-m", "support.shared_memory_probe", str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--mount", *user, "sh", "-c", mount, "sh", *probe],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert printed(done) == {"before": True, "lost": True, "again": True, "after": True}
    assert "Insufficient" not in (tmp_path / "server.log").read_text()
