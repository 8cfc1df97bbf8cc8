"""The errors about mistakes in settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MISSING = {"model": "the name of a model on a hub, or a model directory"}
ADDRESSES = {
    "kv_events": "tcp://*:PORT, say",
    "remote_url": "redis://HOST:PORT, or with TLS rediss://HOST:PORT?ssl_ca_certs=FILE",
    "server_url": "ipc:///DIRECTORY/SOCKET or tcp://HOST:PORT",
}
SECRETS = ("api_key", "remote_password", "remote_url")  # people put passwords in URLs


def unknown_variable(name: str, names: Iterable[str], prefix: str) -> SettingsError:
    """Return the error about a variable that no setting has; it proposes the most like it."""
    return SettingsError(
        f"the environment variable {name}",
        _most_like(name, names) or f"{prefix} and the name of a setting",
        "Correct or unset it; `lmcache-xpu serve --help` lists the settings.",
    )


def validation_failure(error: ValidationError, fields: Iterable[str]) -> SettingsError:
    """Return the error that says which settings are wrong, what they are, and what they may be."""
    values, expectations, fix = [], [], ""
    items = error.errors(include_url=False)
    for item in items:
        if isinstance(contradiction := item.get("ctx", {}).get("error"), SettingsError):
            return contradiction  # it says it all; pydantic wraps any ValueError
        name = str(item["loc"][0]) if item["loc"] else "settings"
        value, expectation = _value_and_expectation(item, name, fields)
        values.append(value)
        expectations.append(f"{name}: {expectation}" if len(items) > 1 else expectation)
        fix = _advice(item, name) or fix
    return SettingsError(", ".join(values), "; ".join(expectations), fix)


def _value_and_expectation(item: ErrorDetails, name: str, fields: Iterable[str]) -> tuple[str, str]:
    if item["type"] == "missing":
        return f"no {name}", MISSING.get(name, "a value")
    value = f"{name} (not shown)" if name in SECRETS else f"{name}={item['input']!r}"
    if item["type"] == "extra_forbidden":
        field = _most_like(name, fields)
        return value, f"{field} instead of {name}" if field else f"no {name}"
    if item["type"] == "string_pattern_mismatch":
        return value, ADDRESSES[name]
    words = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return value, f"{words[0].lower()}{words[1:]}"


def _advice(item: ErrorDetails, name: str) -> str:
    if name == "remote_url":
        return "A password goes into remote_password."
    if name == "port" and str(item["input"]).startswith("tcp://"):
        return (
            "Kubernetes made this variable for a service named lmcache-xpu: set "
            "enableServiceLinks: false on the pod."
        )
    return ""


def _most_like(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")
