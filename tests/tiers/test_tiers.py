"""A complaint: one line in the log, and later the next."""

from __future__ import annotations

from lmcache_xpu import tiers


def test_a_complaint_is_logged_once_a_minute(monkeypatch, log):
    now = [100.0]
    monkeypatch.setattr(tiers.time, "monotonic", lambda: now[0])
    full = "no room for %d bytes"
    for size in (1, 2):
        tiers.complain(full, size)
    assert log == ["disk tier: no room for 1 bytes"]
    now[0] += 60
    tiers.complain(full, 3)
    assert log[1:] == ["disk tier: no room for 3 bytes"]
