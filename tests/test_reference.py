"""The pages of docs/reference that are made from the code are as it makes them, and complete."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import prometheus_client
import pytest
import typer

from lmcache_xpu import metrics
from lmcache_xpu.cli import app
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import commands_page  # noqa: E402  # no package
import metrics_page  # noqa: E402
import reference_docs  # noqa: E402

PACKAGE = ROOT / "src/lmcache_xpu"


def page(name: str) -> str:
    return (reference_docs.REFERENCE / name).read_text()


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_a_page_is_what_the_code_makes(name):
    text = page(name)
    assert reference_docs.PAGES[name](text) == text, "run `make docs`"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_row(name):
    assert f"`{ENV_PREFIX}{name.upper()}` |" in page("settings.md")


def test_every_metric_has_a_row():
    families = {family.name for family in prometheus_client.REGISTRY.collect()}
    own = [name for name in families if name.startswith("lmcache_xpu_")]
    assert len(own) >= 7
    assert [name for name in own if f"| `{name}" not in page("metrics.md")] == []


def test_every_metric_of_the_dashboard_is_explained():
    assert metrics_page.used_metrics() == metrics_page.OTHERS.keys()


def test_every_reason_is_explained():
    """Those that the code counts by a word; others are the class of an error."""
    words = {reason for flow in metrics.FLOWS for reason in flow.reasons}
    words |= metrics.FALLBACK_REASONS.keys()
    assert sorted(reasons_in_code() - words) == []


def reasons_in_code() -> set[str]:
    reasons = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_of(node.func) in ("failed", "fallback"):
                texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
                reasons |= {part.value for part in texts if isinstance(part.value, str)}
    return reasons


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def test_reasons_are_seen():
    assert {"behind", "full", "io", "load"} <= reasons_in_code()


def test_every_option_of_every_command_has_a_row():
    text = page("commands.md")
    every = dict(commands_page.commands(typer.main.get_command(app), "lmcache-xpu"))
    assert {"lmcache-xpu serve", "lmcache-xpu bench engine"} <= every.keys()
    for name, command in every.items():
        _, _, section = text.partition(f"\n## {name}\n")
        section, _, _ = section.partition("\n## ")
        for item in command.params:
            if item.name != "help" and not (
                name.endswith(" serve") and item.name in Settings.model_fields
            ):
                flag = item.opts[0] if item.param_type_name == "option" else item.name.upper()
                assert f"`{flag}`" in section


def test_every_exit_code_of_a_command_has_a_meaning():
    codes = set()
    for path in (PACKAGE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_of(node.func) in ("Exit", "exit"):
                numbers = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
                codes |= {part.value for part in numbers if type(part.value) is int}
    assert {1, 2} <= codes
    assert codes - {128} <= reference_docs.MEANINGS.keys()  # 128: and the number of the signal
