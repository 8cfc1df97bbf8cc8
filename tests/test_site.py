"""The site builds without a warning, and shows every page of docs/ but the lab notes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"


def build(root: Path, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_REPO_URL": "https://example.org/files"}
    env |= variables
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    script = tmp_path_factory.mktemp("mermaid") / "mermaid.min.js"  # `make docs` gets the real one
    script.write_text("// Mermaid")
    run = build(ROOT, folder, DOCS_MERMAID=str(script))
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_a_link_to_a_heading_that_is_not_there_ends_the_build(tmp_path):
    for name in ("docs", "scripts", "mkdocs.yml"):
        source, copy = ROOT / name, tmp_path / name
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    with (tmp_path / "docs/faq.md").open("a") as page:
        page.write("\n[nowhere](troubleshooting.md#nowhere)\n")
    run = build(tmp_path, tmp_path / "site")
    assert (run.returncode, "does not contain an anchor '#nowhere'" in run.stderr) == (1, True)


def test_every_page_is_in_the_navigation(site):
    sidebar, _, _ = (site / "404.html").read_text().partition("md-content")
    docs = ROOT / "docs"
    pages = [
        page.relative_to(docs).with_suffix("").as_posix()
        for page in docs.rglob("*.md")
        if not page.is_relative_to(RESULTS) or page == RESULTS / "README.md"
    ]
    hidden = [page for page in pages if f'href="/{address(page)}"' not in sidebar]
    assert hidden == []


def address(page: str) -> str:
    """The address of a page, less the site's; README and index are their folder's page."""
    folder, _, name = page.rpartition("/")
    if name in ("README", "index"):
        return f"{folder}/" if folder else "."
    return f"{page}/"


def test_links_out_of_the_pages_lead_to_the_repository(site):
    page = (site / "concepts/reliability/index.html").read_text()
    assert 'href="https://example.org/files/integration_tests/breaks.py"' in page


def test_the_site_has_the_overview_of_results_and_its_pictures_alone(site):
    files = [path for path in (site / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".png"}
    pages = {
        path.relative_to(site / "results").as_posix() for path in files if ".html" in path.name
    }
    assert pages == {"index.html", "loadtest/report.html"}


def test_links_to_lab_notes_lead_to_the_repository(site):
    page = (site / "results/index.html").read_text()
    assert 'href="https://example.org/files/docs/results/h100.md"' in page


def test_tables_and_lists_are_drawn(site):
    """GitHub draws some that MkDocs takes for text: those without an empty line above them."""
    text = re.compile(r"<p>\||<p>- |\n- ")
    assert [page for page in site.rglob("*.html") if text.search(prose(page))] == []


def prose(page: Path) -> str:
    return re.sub(r"<(pre|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)


def test_diagrams_are_drawn(site):
    assert '<pre class="mermaid">' in (site / "concepts/architecture/index.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site):
    """Fonts, styles and scripts are its own. Material would fetch Mermaid, unless it is there."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r'(?:src|rel="stylesheet" href)="(?:https?:)?//', text) == []
        own = re.findall(r'src="([^"]*mermaid[^"]*)"', text)
        assert len(own) == ('<pre class="mermaid">' in text)
        assert all((page.parent / src).read_text() == "// Mermaid" for src in own)


def test_without_mermaid_the_site_is_built_and_material_fetches_it(tmp_path):
    run = build(ROOT, tmp_path, DOCS_MERMAID=str(tmp_path / "missing.js"))
    assert run.returncode == 0, run.stderr
    assert "mermaid-" not in (tmp_path / "concepts/architecture/index.html").read_text()
