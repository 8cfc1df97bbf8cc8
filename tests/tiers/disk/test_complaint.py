"""A complaint: once a minute, however often its cause occurs."""

from __future__ import annotations

from lmcache_xpu.tiers.disk import complaint


def test_a_complaint_is_logged_once_a_minute(monkeypatch, log):
    now = [100.0]
    monkeypatch.setattr(complaint.time, "monotonic", lambda: now[0])
    full = complaint.Complaint("no room for %d bytes")
    for size in (1, 2):
        full.log(size)
    assert log == ["disk tier: no room for 1 bytes"]
    now[0] += 60
    full.log(3)
    assert log[1:] == ["disk tier: no room for 3 bytes"]
