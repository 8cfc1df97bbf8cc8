"""The chart's own files: versions, what is made from what, packaging, earlier values."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml
from chart import (
    CHART,
    CI_FILES,
    FROZEN,
    GONE,
    MODEL,
    ROOT,
    earlier_values,
    helm,
    merged,
    rendered,
    template,
)

import lmcache_xpu


def test_both_versions_are_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == lmcache_xpu.__version__


def test_the_schema_is_made_from_its_sources():
    from chart_schema import SCHEMA, schema

    assert SCHEMA.read_text() == schema(), "stale: run `make helm-docs`"


def test_the_readmes_tables_are_made_from_the_values():
    from chart_readme import README, readme

    assert README.read_text() == readme(README.read_text()), "stale: run `make helm-docs`"


def test_every_value_says_what_it_is():
    from chart_readme import README

    rows = re.findall(r"^\| (`.*`) \| .* \|(.*)\|$", README.read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning.strip()] == []


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name)
def test_lint_finds_nothing(path):
    done = helm("lint", "--strict", str(CHART), "-f", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_holds_the_files_of_monitoring(tmp_path):
    """They are links in the chart; a package with links in it would render empty objects."""
    done = helm("package", str(CHART), "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    package = tmp_path / f"lmcache-xpu-{lmcache_xpu.__version__}.tgz"
    with tarfile.open(package) as archive:
        members = {member.name: member for member in archive.getmembers()}

        def text(name: str) -> str:
            member = members[f"lmcache-xpu/{name}"]
            assert member.isfile()
            return archive.extractfile(member).read().decode()

        monitoring = ROOT / "monitoring"
        assert text("files/alerts.yaml") == (monitoring / "alerts.yaml").read_text()
        dashboard = monitoring / "dashboards" / "lmcache-xpu.json"
        assert text("files/dashboard.json") == dashboard.read_text()
    assert not [name for name in members if "/ci/" in name]
    values = {**MODEL, "monitor": {"rules": True, "dashboard": True}}
    objects = rendered(helm("template", "kv", str(package), values=values))
    rules = objects.one("PrometheusRule")["spec"]["groups"]
    assert rules[:-1] == yaml.safe_load((monitoring / "alerts.yaml").read_text())["groups"]
    [(_, shown)] = objects.one("ConfigMap", "kv-lmcache-xpu-dashboard")["data"].items()
    own = ("uid", "title")
    assert {k: v for k, v in json.loads(shown).items() if k not in own} == {
        k: v for k, v in json.loads(dashboard.read_text()).items() if k not in own
    }


def test_dashboards_of_two_releases_live_side_by_side():
    def dashboard(release: str, namespace: str) -> tuple[str, str]:
        values = {**MODEL, "monitor": {"dashboard": True}}
        done = helm("template", release, str(CHART), "-n", namespace, values=values)
        [config] = rendered(done).of("ConfigMap")
        [(file, text)] = config["data"].items()
        return file, json.loads(text)["uid"]

    made = [dashboard("kv", "a"), dashboard("kv", "b"), dashboard("other", "a")]
    for column in zip(*made, strict=True):
        assert len(set(column)) == 3
    assert all(len(uid) <= 40 for _, uid in made)  # Grafana's limit


def test_this_versions_values_are_frozen_for_the_next_one():
    """So that the next version's tests have them."""
    frozen = Path(__file__).parent / "frozen" / f"{lmcache_xpu.__version__}.yaml"
    assert frozen in FROZEN, "run `make helm-docs`"
    assert frozen.read_text() == (CHART / "values.yaml").read_text(), "run `make helm-docs`"


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.name)
def test_values_of_an_earlier_version_still_render(path):
    """All of them at once, as a user's copy of values.yaml would give them."""
    assert rendered(template(values={**earlier_values(path), **MODEL})).engines()


@pytest.mark.parametrize(
    "path", [path for path in FROZEN if "-" in path.stem], ids=lambda p: p.name
)
def test_what_is_gone_is_refused_with_what_to_do_instead(path):
    values = yaml.safe_load(path.read_text())
    done = template(values={**values, **MODEL})
    assert done.returncode
    for names in GONE:
        if functools.reduce(lambda part, name: part.get(name, {}), names, values):
            name = ".".join(names)
            assert f'{name} must be one of the following: "gone: ' in done.stderr
            assert names[-1] in (ROOT / "docs" / "guides" / "upgrade.md").read_text()


def test_notes_name_the_next_commands(tmp_path):
    """`helm template` leaves the notes out, and `helm install` wants a cluster: a copy of the
    chart has them in a template."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    (copy / "templates" / "NOTES.txt").rename(copy / "files" / "notes.txt")
    (copy / "templates" / "notes.yaml").write_text(
        "kind: Notes\nmetadata: {name: n}\n"
        'text: {{ tpl (.Files.Get "files/notes.txt") . | toJson }}\n'
    )
    several = {"replicas": 2, "settings": {"model": "org/model", "pipeline_parallel": 2}}
    values = merged(MODEL, {"models": {"n": {**MODEL["models"]["m"], **several}}})
    done = helm("template", "kv", str(copy), "-n", "serving", values=values)
    notes = rendered(done).one("Notes")["text"]
    assert "helm -n serving test kv --logs" in notes
    assert "--filter name=kv-lmcache-xpu-m-chat --filter name=kv-lmcache-xpu-n-chat" in notes
    # Longer than the rollout's own deadline: two pods, one after the other.
    limit_s = rendered(template(values=values)).engines()["n"]["spec"]["progressDeadlineSeconds"]
    assert f"rollout status deployment/kv-lmcache-xpu-n --timeout={2 * limit_s}s" in notes
    assert notes.count("no router") == 1
    assert notes.count("SYS_PTRACE") == 1
    assert "No API key" in notes
    assert "at http://kv-lmcache-xpu-m:80/v1" in notes
