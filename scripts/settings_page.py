"""Make docs/reference/settings.md."""

from __future__ import annotations

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from environment import ROOT
from markdown_table import cell, rows
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from stack_settings import chapters

from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import DIAGNOSTIC_VARIABLES, Settings

sys.path.insert(0, str(ROOT / "helm"))
from chart_schema import CHARTS_OWN  # no package

# Where a setting begins, and the heading of those that follow it.
CHAPTERS = {"model": "The server", "device": "The engine", "offload": "The tiers"}
UNITS = {"gib": "GiB", "mib": "MiB", "s": "seconds", "tokens": "tokens"}
TOKENS = {"max_model_len", "max_num_batched_tokens"}
# Of settings that came after 0.1.0.
SINCE: dict[str, str] = {}
# How Compose and the chart name a setting whose name is another there.
ELSEWHERE = {
    "host": ("always 0.0.0.0", "`settings.host`, default 0.0.0.0"),
    "port": ("`API_PORT`, on the host", "`service.port`"),
    "device": ("`LMCACHE_XPU_DEVICE`", "`settings.device`; `auto` follows `gpu.kind`"),
    "disk_path": ("`KV_DIR`, on the host", "`disk`"),
    "api_key": ("`LMCACHE_XPU_API_KEY`", "`apiKeySecret`"),
    "remote_password": ("`LMCACHE_XPU_REMOTE_PASSWORD`", "`remotePasswordSecret`"),
}
DIAGNOSIS = {
    "STOCK": "`1`: the name of LMCache's stock connector keeps LMCache's own connector",
    "DEVICES": "Device types that this package serves; default `xpu,cpu`",
    "ALLOW_UNTESTED": "`1`: go on with versions that were not tested",
    "KERNELS_READ_HOST": "`0`: no kernel reads or writes host memory, everything is copied",
}


def kind(field: FieldInfo) -> str:
    """What a setting's value is: its type or its choices."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    names |= {Path: "directory", SecretStr: "text, secret"}
    return names.get(annotation, "arguments")


def bounds(field: FieldInfo) -> str:
    """What a setting's value has to keep to."""
    signs = {"ge": "from {}", "gt": "above {}", "le": "up to {}", "lt": "below {}"}
    limits = []
    for item in field.metadata:
        for name, text in signs.items():
            if hasattr(item, name):
                limits.append(text.format(f"{getattr(item, name):g}"))
        if getattr(item, "min_length", None):
            limits.append("not empty")
        if pattern := getattr(item, "pattern", None):
            limits.append(f"`{cell(pattern)}`")
    return ", ".join(limits)


def unit(name: str) -> str:
    """The unit of a setting, which ends its name."""
    return "tokens" if name in TOKENS else UNITS.get(name.rpartition("_")[2], "")


def default(field: FieldInfo) -> str:
    """What holds when a setting is not set."""
    if field.is_required():
        return "required"
    if field.default in (None, ()):
        return "unset"
    value = field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def option(name: str, field: FieldInfo) -> str:
    """How a setting is written on the command line of `serve`."""
    if SecretStr in get_args(field.annotation):
        return "none: others could read it"
    if name in ("model", "extra_args"):
        return {"model": "`MODEL`", "extra_args": "`-- ...`"}[name]
    flag = name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if field.annotation is bool else f"`--{flag}`"


def setting(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The row of a setting."""
    since = SINCE.get(name)
    return (
        f"{option(name, field)}<br>`{ENV_PREFIX}{name.upper()}`",
        cell(field.description or "") + (f" (since {since})" if since else ""),
        default(field),
        unit(name),
        "; ".join(filter(None, [kind(field), bounds(field)])),
    )


def page(text: str) -> str:
    """docs/reference/settings.md."""
    head = ("option, variable", "what it is", "default", "unit", "values")
    assert ELSEWHERE.keys() >= CHARTS_OWN
    lines = [
        "# Settings",
        "",
        "What can be set, how, and within which bounds?",
        "",
        "An option of `lmcache-xpu serve` wins over its variable, and that over the default. An",
        "empty variable counts as unset. A misspelt variable ends the start with a message. Sizes",
        "are in GiB (2**30 bytes), and per device. All settings are there since 0.1.0, if their",
        "row does not say otherwise.",
        "",
        "`--cpu-gib` is the variable `LMCACHE_XPU_CPU_GIB`, the same line in Compose's `.env`, and",
        "`settings.cpu_gib` in the Helm chart. [Below](#other-names) are the exceptions, and what",
        "[the Compose stack](#the-compose-stack) has besides.",
    ]
    body: list[tuple[str, ...]] = []
    for name, field in Settings.model_fields.items():
        if name in CHAPTERS:
            if body:
                lines += ["", rows(head, body)]
            lines += ["", f"## {CHAPTERS[name]}"]
            body = []
        body.append(setting(name, field))
    elsewhere = ((f"`{name}`", *names) for name, names in ELSEWHERE.items())
    lines += ["", rows(head, body), "", "## Other names", ""]
    lines += [rows(("setting", "in Compose", "in the chart"), elsewhere), ""]
    lines += [*chapters(), "", "## Switches for diagnosis", ""]
    lines += ["Not settings of a deployment. They are variables only.", ""]
    names = sorted(name.removeprefix(ENV_PREFIX) for name in DIAGNOSTIC_VARIABLES)
    lines.append(
        rows(("variable", "effect"), ((f"`{ENV_PREFIX}{n}`", DIAGNOSIS[n]) for n in names))
    )
    return "\n".join(lines) + "\n"
