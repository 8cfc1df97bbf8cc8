"""What the documents name exists: files, modules, targets of links. The two lives stay short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "integration_tests", "loadtests", "measurements", "scripts", "helm")
FILES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

FILE = re.compile(r"[\w./-]*\w\.py\b")
MODULE = re.compile(r"\blmcache_xpu(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
# Pages that a repository has on GitHub, seen from its first page: they work in any fork.
HOST_PAGE = re.compile(
    r"\.\./\.\./(?:actions/workflows/\w+\.yml(?:/badge\.svg)?|discussions|issues)"
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
STEP = re.compile(r"^\d+\. (.*)$", re.MULTILINE)

STEPS, STEP_WORDS = 8, 25

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


PAGE_WORDS, README_LINES = 1200, 120  # two screens
# Lab notes, and the tables that are made from the code.
LONG = ("results", "settings.md", "commands.md", "metrics.md")
GENERATED = ("lmcache-options.md", "exit-codes.md")  # in part

# Words of the project's own making, in pages that are written by hand; results are lab notes.
PRIVATE = re.compile(
    r"(?i)\b(?:beside|in turn|mend(?:s|ed|ing)?|own (?:prefix )?hits?|rooms|seats?|verdicts?)\b"
)
PAGES = [
    document
    for document in DOCUMENTS
    if document.parent.name == "docs" or document.parent.parent.name == "docs"
    if document.parent.name != "results" and document.name not in (*LONG, *GENERATED)
]


@every_document
def test_a_page_is_short_enough_to_be_read(document):
    if not {document.name, document.parent.name} & set(LONG) and document.name != "CONTRIBUTING.md":
        assert len(document.read_text().split()) <= PAGE_WORDS
    if document == ROOT / "README.md":
        assert len(document.read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_private_words(page):
    assert PRIVATE.findall(page.read_text()) == [], "say it in the field's nouns"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It loads beside steps. Mended in turn.", ["beside", "Mended", "in turn"]),
        ("`serve --in-turn` asks each; besides, headrooms and amended rows stay.", []),
    ],
)
def test_private_words_are_seen(text, words):
    assert PRIVATE.findall(text) == words


@every_document
def test_the_files_that_are_named_exist(document):
    names = {name.lstrip("./") for name in FILE.findall(document.read_text())}
    missing = [name for name in names if not any(path.endswith(f"/{name}") for path in FILES)]
    assert missing == []


@every_document
def test_the_modules_that_are_named_exist(document):
    names = MODULE.findall(document.read_text())
    assert [name for name in names if not is_module(name) and not is_member(name)] == []


@every_document
def test_the_targets_of_relative_links_exist(document):
    for target, heading in LINK.findall(document.read_text()):
        if ":" in target or HOST_PAGE.fullmatch(target):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), target
        if heading:
            assert heading in headings(path), f"{target}#{heading}"


def test_links_of_the_first_page_to_the_host_name_workflows_that_exist():
    names = re.findall(r"actions/workflows/([\w.]+)", (ROOT / "README.md").read_text())
    assert names
    assert [name for name in names if not (ROOT / ".github/workflows" / name).is_file()] == []


def test_the_owner_of_the_repository_is_written_where_the_recipe_says():
    """Whoever publishes replaces it there; all other addresses follow the repository."""
    command = ["git", "grep", "-l", "ORGANISATION", "--", ":!tests", ":!docs/guides/release.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    places = done.stdout.split()
    recipe = (ROOT / "docs/guides/release.md").read_text()
    assert [place for place in places if place not in recipe] == []


@pytest.mark.parametrize("life", ["The life of a store", "The life of a load"])
def test_a_life_has_eight_short_steps_that_each_name_a_file(life):
    text = (ROOT / "docs/concepts/architecture.md").read_text()
    (section,) = re.findall(rf"^## {life}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    steps = STEP.findall(section)
    assert len(steps) == STEPS
    assert [step for step in steps if len(step.split()) > STEP_WORDS] == []
    assert [step for step in steps if not FILE.search(step)] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see `tiers/disk/tier.py`.", ["tiers/disk/tier.py"]),
        ("[breaks](../integration_tests/breaks.py)", ["../integration_tests/breaks.py"]),
        ("a pytest.ini, a file.pyc", []),
    ],
)
def test_names_of_files_are_seen(text, names):
    assert FILE.findall(text) == names


def is_module(name: str) -> bool:
    path = ROOT / "src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_member(name: str) -> bool:
    """Whether a module's text has the last part of the name: a class, a function."""
    module, _, member = name.rpartition(".")
    path = ROOT / "src" / f"{module.replace('.', '/')}.py"
    return path.is_file() and re.search(rf"\b{member}\b", path.read_text()) is not None


def headings(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    texts = HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}
