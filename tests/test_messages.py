"""Each warning and error names its part of docs/troubleshooting.md, and each part has a message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lmcache_xpu import errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/lmcache_xpu"
ANCHOR = re.compile(r"\(docs: troubleshooting#([\w-]+)\)")
LEVELS = {"warning", "error", "exception", "critical"}
LOGGERS = {"logger", "_logger"}
COMPLAINT = "complain"  # a constant that several places share is seen by its anchor


def messages(source: str) -> list[ast.Call]:
    """The calls that log a warning or an error, or say what is to be logged."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if logs(call.func) or is_complaint(call)]


def logs(function: ast.expr) -> bool:
    if not (isinstance(function, ast.Attribute) and function.attr in LEVELS):
        return False
    logger = function.value
    name = logger.attr if isinstance(logger, ast.Attribute) else getattr(logger, "id", "")
    return name in LOGGERS


def is_complaint(call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Name) and call.func.id == COMPLAINT
    return is_named and isinstance(call.args[0], ast.Constant)


def anchors(node: ast.AST) -> list[str]:
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [name for text in texts if isinstance(text, str) for name in ANCHOR.findall(text)]


MODULES = sorted(PACKAGE.rglob("*.py"))
MESSAGES = [(path, call) for path in MODULES for call in messages(path.read_text())]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]


@pytest.fixture(scope="module")
def sections():
    _, _, by_log_line = (ROOT / "docs/troubleshooting.md").read_text().partition("## By log line")
    return re.findall(r"^### (.*)$", by_log_line, re.MULTILINE)


@pytest.mark.parametrize(
    "call",
    [call for _, call in MESSAGES],
    ids=[f"{path.relative_to(PACKAGE)}:{call.lineno}" for path, call in MESSAGES],
)
def test_a_warning_names_its_section(call, sections):
    names = anchors(call)
    assert len(names) == 1, "end the message with (docs: troubleshooting#NAME)"
    assert names[0] in sections, f"docs/troubleshooting.md has no section {names[0]}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_its_section(kind, sections):
    assert kind.anchor in sections


def test_every_section_has_a_message(sections):
    in_code = {name for path in MODULES for name in anchors(ast.parse(path.read_text()))}
    assert sorted(in_code | {kind.anchor for kind in KINDS}) == sorted(sections)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("logger.warning('a')", 1),
        ("self._logger.error('a')", 1),
        ("complain('a')", 1),
        ("complain(A)", 0),
        ("logger.info('a')", 0),
        ("parser.error('a')", 0),
    ],
)
def test_messages_are_seen(line, count):
    assert len(messages(line)) == count
