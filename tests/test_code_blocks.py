"""What readers copy from documents has right names: targets, options, keys; and can be read."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lmcache_xpu.cli import app
from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import DIAGNOSTIC_VARIABLES, Settings

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "helm/lmcache-xpu/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}[^\n]*\n+)+)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME, FLAG = re.compile(r"[a-z][a-z-]*"), re.compile(r"--[a-z][a-z-]*")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
ASSIGNMENT = re.compile(r"^(\w+)=")
VARIABLE = re.compile(rf"\b{ENV_PREFIX}[A-Z0-9_]*[A-Z0-9]\b")
# Locust's own help leaves out what a locustfile adds.
LOCUST_HELP = """
from locust.argument_parser import get_parser
from loadtests.options import Options
parser = get_parser()
Options.add_to(parser)
parser.print_help()
"""
# Programs behind the targets that pass ARGS on.
PROGRAMS = {
    "loadtest": ("-c", LOCUST_HELP),
    "loadtest-compare": ("-m", "loadtests.compare"),
    "capacity": ("-m", "loadtests.capacity"),
}
SEPARATORS = {"&&", "||", ";", "|", "(", ")", "&"}
MAKEFILE = (ROOT / "Makefile").read_text()
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "helm/lmcache-xpu/values.yaml").read_text())
VARIABLES = (
    {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    | DIAGNOSTIC_VARIABLES
    | {f"{ENV_PREFIX}NAME"}
)  # any of them
FORMATS = {
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "json": json.loads,
    "toml": tomllib.loads,
    "env": lambda text: [assignment(line) for line in text.splitlines()],
}
SHELL = {"", "sh", "bash", "shell", "console"}

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each block; an indented one has no language."""
    for indent, language, block in FENCE.findall(text):
        yield language, re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
    for block in INDENTED.findall(FENCE.sub("", text)):
        yield "", re.sub("^ {4}", "", block, flags=re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; a line that no shell could read is none."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="();|&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:  # a quote that goes on in the next line
            words = line.split()
        command: list[str] = []
        for word in [*words, ";"]:
            if word not in SEPARATORS:
                command.append(word)
            elif command:
                yield command
                command = []


def mistake(command: list[str]) -> str:
    """What a command of ours gets wrong; empty if nothing."""
    while command and (ASSIGNMENT.match(command[0]) or command[0] in ("sudo", "time", "exec")):
        command = command[1:]
    if not command:
        return ""
    program, arguments = Path(command[0]).name, command[1:]
    checks = {"make": make_mistake, "lmcache-xpu": cli_mistake, "helm": helm_mistake}
    return checks[program](arguments) if program in checks else ""


def make_mistake(arguments: list[str]) -> str:
    targets = set(TARGET.findall(MAKEFILE))
    for word in arguments:
        variable = ASSIGNMENT.match(word)
        if variable:
            if f"$({variable[1]})" not in MAKEFILE:
                return f"make knows no variable {variable[1]}"
            target = next((word for word in arguments if word in PROGRAMS), "")
            if variable[1] == "ARGS" and target:
                flags = re.findall(r"(?<!\S)--[a-z][a-z-]*", word.partition("=")[2])
                if strange := set(flags) - program_flags(target):
                    return f"{target} has no option {min(strange)}"
        elif NAME.fullmatch(word) and word not in targets:
            return f"make has no target {word}"
    return ""


@functools.cache
def program_flags(target: str) -> set[str]:
    """The options that a program's help shows."""
    command = [sys.executable, *PROGRAMS[target], "--help"]
    env = os.environ | {"COLUMNS": "250", "NO_COLOR": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z][a-z-]*", run.stdout))


def cli_mistake(arguments: list[str]) -> str:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and arguments and NAME.fullmatch(arguments[0]):
        name, *arguments = arguments
        if name not in command.commands:
            return f"{command.name or 'lmcache-xpu'} has no command {name}"
        command = command.commands[name]
    flags = {"--help"}.union(*((*item.opts, *item.secondary_opts) for item in command.params))
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        flag = word.partition("=")[0]
        if FLAG.fullmatch(flag) and flag not in flags:
            return f"{command.name or 'lmcache-xpu'} has no option {flag}"
    return ""


def helm_mistake(arguments: list[str]) -> str:
    """Check the keys that --set gives values to, in commands that name this chart."""
    if not any("lmcache-xpu" in word for word in arguments):
        return ""
    for option, value in itertools.pairwise(arguments):
        if option in ("--set", "--set-string", "--set-json", "--set-file"):
            for assigned in re.split(r",(?=[\w.]+=)", value):
                if not is_value(assigned.partition("=")[0].split(".")):
                    return f"the chart has no value {assigned}"
    return ""


def is_value(path: list[str]) -> bool:
    """Whether the chart has a value of that path; models take the keys of `defaults`."""
    node: Any = VALUES
    if path[0] == "models":
        node, path = VALUES["defaults"], path[2:]
    for key in path:
        name = key.partition("[")[0]
        if node is VALUES["defaults"]["settings"]:
            return name in Settings.model_fields
        if not isinstance(node, dict) or not node:  # what is in it, others decide
            return True
        if name not in node:
            return False
        node = node[name]
    return True


def assignment(line: str) -> None:
    """Raise ValueError unless a line of an .env file is empty, a comment or an assignment."""
    if line.strip() and not line.startswith("#") and not ASSIGNMENT.match(line):
        raise ValueError(line)


@every_document
def test_commands_exist(document):
    text = document.read_text()
    shell = [block for language, block in blocks(text) if language in SHELL]
    shell += INLINE.findall(FENCE.sub("", text))
    wrong = {
        " ".join(c): error for block in shell for c in commands(block) if (error := mistake(c))
    }
    assert wrong == {}


@every_document
def test_blocks_can_be_read(document):
    for language, block in blocks(document.read_text()):
        FORMATS.get(language, str)(block)


@every_document
def test_variables_exist(document):
    assert set(VARIABLE.findall(document.read_text())) - VARIABLES == set()


@every_document
def test_values_of_the_chart_exist(document):
    for language, block in blocks(document.read_text()):
        if language == "yaml":
            for values in FORMATS["yaml"](block):
                assert wrong_values(values) == []


def wrong_values(values: Any) -> list[str]:
    """Keys of a block of the chart's values that the chart does not have."""
    if not isinstance(values, dict) or "models" not in values:
        return []
    paths = [[key] for key in values]
    for name, model in values["models"].items():
        paths += [["models", name, key] for key in model or ()]
        paths += [["models", name, "settings", key] for key in (model or {}).get("settings", ())]
    return [".".join(path) for path in paths if not is_value(path)]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("make demo && make tests", "make has no target tests"),
        ("make loadtest HOTS=http://x", "make knows no variable HOTS"),
        ("make loadtest HOST=http://x # load", ""),
        ('make loadtest ARGS="-u 3 --qps 1 --usrs 3"', "loadtest has no option --usrs"),
        ("lmcache-xpu doctro", "lmcache-xpu has no command doctro"),
        ("A=1 .venv/bin/lmcache-xpu size M --usrs 3", "size has no option --usrs"),
        ("lmcache-xpu bench engine --reprot f", "engine has no option --reprot"),
        ("lmcache-xpu serve M --cpu-gib 3 -- --seed 1", ""),
        (
            "helm install x ./lmcache-xpu --set models.q.settings.cpu_gb=3",
            "the chart has no value models.q.settings.cpu_gb=3",
        ),
        ("helm install x ./lmcache-xpu --set models.q.settings.cpu_gib=3,image.tag=a", ""),
    ],
)
def test_mistakes_are_seen(line, error):
    assert next(filter(None, map(mistake, commands(line))), "") == error


def test_blocks_are_seen():
    text = "a\n\n    make x\n\nb\n\n```yaml\nb: 1\n```\n"
    assert sorted(blocks(text)) == [("", "make x\n\n"), ("yaml", "b: 1\n")]


def test_wrong_values_are_seen():
    values = yaml.safe_load("models: {q: {settings: {cpu_gb: 1}, repliccas: 2}}")
    assert wrong_values(values) == ["models.q.repliccas", "models.q.settings.cpu_gb"]
