"""Commands that a reader can copy: the engine of some settings, and a question to it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lmcache_xpu.harness.client import Message
from lmcache_xpu.launch.settings import Settings

__all__ = ["ask_command", "serve_command", "write_question"]


def serve_command(settings: Settings) -> str:
    """Return the `lmcache-xpu serve` that has these settings, and listens on the default port."""
    words = [_program(), "serve", settings.model]
    for name in sorted(settings.model_fields_set - {"model", "port"}):
        value = getattr(settings, name)
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def write_question(path: Path, messages: Sequence[Message], *, model: str, tokens: int) -> None:
    """Write a request to /v1/chat/completions whose answer is the same each time."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")


def ask_command(settings: Settings, question: Path) -> str:
    """Return the curl that sends a question to the engine of `serve_command`."""
    url = f"http://{settings.host}:{Settings.model_fields['port'].default}/v1/chat/completions"
    header = "Content-Type: application/json"
    return shlex.join(["curl", "-s", url, "-H", header, "-d", f"@{question}"])


def _program() -> str:
    """This installation's `lmcache-xpu`, in the shortest words that the reader's shell knows."""
    program = Path(sys.executable).parent / "lmcache-xpu"
    if shutil.which(program.name) == str(program):
        return program.name
    here = Path.cwd()
    return os.fspath(program.relative_to(here) if program.is_relative_to(here) else program)
