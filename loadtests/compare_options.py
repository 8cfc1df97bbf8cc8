"""What the comparison's command line says, and what it must not say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import httpx
import typer

from loadtests.variants import VARIANTS

__all__ = ["REFUSED", "more_of", "refuse", "urls_of", "versions_of"]

ANSWER_S = 10.0
REFUSED = 2  # the exit code of a run that measured nothing


def versions_of(urls: Mapping[str, str]) -> dict[str, str]:
    """What servers that somebody else started say of themselves."""
    key = os.environ.get("LOCUST_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    versions = {}
    for name, url in urls.items():
        try:
            answer = httpx.get(f"{url}/version", headers=headers, timeout=ANSWER_S, trust_env=False)
            versions[name] = str(answer.json()["version"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            versions[name] = "not said"
    return versions


def urls_of(pairs: list[str]) -> dict[str, str]:
    """Servers by variant; each answers, or no load is sent to any."""
    urls = {}
    for pair in pairs:
        name, equals, url = pair.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            refuse(
                f"found --url {pair}; expected VARIANT=http://HOST:PORT, e.g. "
                f"--url none=http://a:8000 --url cpu=http://b:8000. For one server: "
                f"make loadtest HOST={pair if '://' in pair else 'http://...'}"
            )
        if name not in VARIANTS:
            refuse(f"found --url for {name}; expected one of {', '.join(VARIANTS)}.")
        try:
            httpx.get(f"{url}/v1/models", timeout=ANSWER_S, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            refuse(f"found no answer from {name}={url} ({error}); expected a server that runs.")
        urls[name] = url.rstrip("/")
    return urls


def more_of(words: list[str]) -> list[str]:
    """The arguments that ARGS brought: all but the profile, which make passes on its own."""
    if "--profile" not in words:
        return words
    at = words.index("--profile")
    return words[:at] + words[at + 2 :]


def refuse(reason: str) -> NoReturn:
    """End with one line: nothing was measured."""
    print(f"loadtest-compare: {reason}", file=sys.stderr)
    raise typer.Exit(REFUSED)
