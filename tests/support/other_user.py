"""What another user of the host can do, tried by a child process of that user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(attempt: Callable[[], Any]) -> Any:
    """Run a function as the user `nobody` in a forked child; return its value, or its error's name.

    The value has to be one that JSON can hold.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                value = attempt()
            except Exception as error:
                value = type(error).__name__
            os.write(writer, json.dumps(value).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)
