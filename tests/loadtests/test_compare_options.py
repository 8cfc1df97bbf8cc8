"""What servers that somebody else started are asked before a comparison."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loadtests.compare_options import versions_of


@pytest.mark.parametrize(
    ("key", "headers"), [(None, {}), ("secret", {"Authorization": "Bearer secret"})]
)
def test_a_server_with_a_key_says_its_version_too(
    key: str | None, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    def get(url: str, **options: Any) -> httpx.Response:
        asked.append((url, options["headers"]))
        return httpx.Response(200, json={"version": "1.2.3"})

    monkeypatch.setattr(httpx, "get", get)
    if key is None:
        monkeypatch.delenv("LOCUST_API_KEY", raising=False)
    else:
        monkeypatch.setenv("LOCUST_API_KEY", key)
    assert versions_of({"cpu": "http://a:8000"}) == {"cpu": "1.2.3"}
    assert asked == [("http://a:8000/version", headers)]
