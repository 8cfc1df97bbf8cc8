"""Make docs/reference/commands.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from markdown_table import cell, rows

from lmcache_xpu.cli import app
from lmcache_xpu.launch.settings import Settings


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each command with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def parameter(item: Any) -> tuple[str, str, str]:
    """The row of an option or an argument."""
    if item.param_type_name == "option":
        name = ", ".join(f"`{flag}`" for flag in (*item.opts, *item.secondary_opts))
    else:
        name = f"`{(item.metavar or item.name or '').upper()}`"
    text = getattr(item, "help", None) or ""
    if item.envvar:
        text += f" Else from `{item.envvar}`."
    fallback = item.default
    if item.required:
        shown = "required"
    elif fallback is None or callable(fallback) or fallback in ((), [], "") or "(default:" in text:
        shown = ""
    else:
        shown = f"`{str(fallback).lower() if isinstance(fallback, bool) else fallback}`"
    return name, cell(text), shown


def page(text: str) -> str:
    """docs/reference/commands.md."""
    root = typer.main.get_command(app)
    lines = ["# Commands", "", "What can `lmcache-xpu` do, and with which options?", ""]
    every = list(commands(root, "lmcache-xpu"))
    lines.append(
        rows(
            ("command", "what it does"),
            ((f"[`{n}`](#{n.replace(' ', '-')})", cell(first(c.help))) for n, c in every),
        )
    )
    lines += ["", "`lmcache-xpu --version` shows the version. Every command has `--help`."]
    lines += ["[Exit codes](exit-codes.md) says what a command ends with."]
    for name, command in every:
        help_text = re.sub(r"[ \n]*\n\n[ ]*", "\n\n", (command.help or "").strip())
        paragraphs = [" ".join(part.split()) for part in help_text.split("\n\n")]
        lines += ["", f"## {name}", "", "\n\n".join(paragraphs)]
        items = [item for item in command.params if item.name != "help"]
        if name.endswith(" serve"):
            lines += ["", "[Settings](settings.md) has one option for each setting. And these:"]
            items = [item for item in items if item.name not in Settings.model_fields]
        if items:
            head = ("option", "what it is", "default")
            lines += ["", rows(head, (parameter(item) for item in items))]
    return "\n".join(lines) + "\n"


def first(text: str | None) -> str:
    """The first sentence of a help text."""
    return " ".join((text or "").split("\n\n")[0].split())
