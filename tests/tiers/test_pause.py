"""A pause and a complaint: one line in the log, and later the next."""

from __future__ import annotations

from lmcache_xpu.tiers import pause


def test_a_pause_is_said_once_and_ends(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(pause.time, "monotonic", lambda: now[0])
    quiet = pause.Pause("no reads")
    assert not quiet.on
    quiet.begin(5, OSError("away"))
    assert caplog.messages == [
        "shared tier: no reads for 5 s: away (docs: troubleshooting#shared-paused)"
    ]
    now[0] += 4
    quiet.begin(5, OSError("away"))  # longer, and not said again
    now[0] += 4
    assert quiet.on
    now[0] += 1
    assert not quiet.on
    quiet.begin(5, OSError("away again"))
    assert len(caplog.messages) == 2


def test_a_complaint_is_logged_once_a_minute(monkeypatch, log):
    now = [100.0]
    monkeypatch.setattr(pause.time, "monotonic", lambda: now[0])
    full = "no room for %d bytes"
    for size in (1, 2):
        pause.complain(full, size)
    assert log == ["disk tier: no room for 1 bytes"]
    now[0] += 60
    pause.complain(full, 3)
    assert log[1:] == ["disk tier: no room for 3 bytes"]
