"""`scripts/install.py` on each base that an image for Intel GPUs is built on, without Docker.

A base is an environment that has the metadata of the packages in `bases/`, and no code. uv is asked
with --dry-run: it resolves, and says what it would change.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from support.installation import BASES, ROOT, environment, pins, run

from lmcache_xpu import versions

# The bases that differ most; the others are only asked whether all can be installed there, and not
# in every run.
MAIN_BASES = ("legacy-0.14.1", "ubuntu-0.32.0", "vllm-0.26.0", "vllm-0.32.0")
ALL_BASES = [
    pytest.param(base, marks=() if base in MAIN_BASES else pytest.mark.matrix) for base in BASES
]
# Packages whose requirements count in the index's words: those of a base have none of their own.
SHARED = re.compile("google|grpc|huggingface|numpy|opentelemetry|prometheus|proto|transformers")
LOCAL = "[[tool.uv.dependency-metadata]]"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image's build has: this package's wheel, pyproject.toml and the scripts."""
    place = tmp_path_factory.mktemp("project")
    done = run("uv", "build", "--wheel", "-q", "--out-dir", str(place / "wheels"), str(ROOT))
    assert done.returncode == 0, done.stdout
    shutil.copytree(ROOT / "scripts", place / "scripts")
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Base -> the Python of an environment that pretends to be it."""
    return {base: make_base(base, tmp_path_factory.mktemp(base)) for base in BASES}


def make_base(base: str, place: Path, *, with_pip: bool = False, **packages: str) -> Path:
    venv.create(place, symlinks=True, with_pip=with_pip)
    [site] = place.glob("lib/python3*/site-packages")
    for bundled in site.glob("setuptools-*"):
        shutil.rmtree(bundled)
    vllm = f"{base.partition('-')[2]}+xpu"
    for name, version in {**pins(base), "vllm": vllm, **packages}.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    (site / "vllm.py").touch()
    return place / "bin/python"


def install(project: Path, python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(str(python), str(project / "scripts/install.py"), "--dry-run", *options)


def real(base: str) -> list[str]:
    """Options: uv asks the index what these require, and doesn't take the base's word."""
    return [option for n in pins(base) if SHARED.match(n) for option in ("--reinstall-package", n)]


def changed(output: str) -> dict[str, str]:
    """Package -> its new version, less those that stay the same."""
    before = set(re.findall(r"^ - (\S+)==(\S+)$", output, re.MULTILINE))
    after = set(re.findall(r"^ [+~] (\S+)==(\S+)$", output, re.MULTILINE))
    return dict(after - before)


def with_requirements(layout: Path, place: Path, edit) -> Path:
    """A copy of the project whose pyproject.toml `edit` has changed."""
    shutil.copytree(layout, place)
    file = place / "pyproject.toml"
    file.write_text(edit(file.read_text()))
    return place


def test_each_accepted_version_of_vllm_has_its_bases():
    images = {f"vllm-{version}" for version in versions.TESTED["vllm"]}
    # The image that is built up from Ubuntu has this version unless it is told another.
    assert images | {f"ubuntu-{versions.installed().vllm}"} <= set(BASES)


@pytest.mark.parametrize("base", ALL_BASES)
def test_nothing_that_is_there_changes(layout, pythons, base):
    done = install(layout, pythons[base], *real(base))
    assert done.returncode == 0, done.stdout
    new = changed(done.stdout)
    assert new["lmcache"] in versions.TESTED["lmcache"]
    assert not new.keys() & pins(base).keys(), new


@pytest.mark.parametrize("base", MAIN_BASES)
def test_nothing_that_is_there_changes_without_a_word_of_the_index(layout, pythons, base):
    done = install(layout, pythons[base])
    assert done.returncode == 0, done.stdout
    assert not changed(done.stdout).keys() & pins(base).keys()


@pytest.mark.parametrize("base", MAIN_BASES)
def test_with_the_requirements_of_lmcaches_wheel_there_is_no_solution(
    layout, pythons, base, tmp_path
):
    def from_the_wheel(text: str) -> str:
        return text.partition(LOCAL)[0] + "[tool.ruff" + text.partition("[tool.ruff")[2]

    project = with_requirements(layout, tmp_path / "project", from_the_wheel)
    done = install(project, pythons[base])
    assert done.returncode != 0
    assert "No solution found" in done.stdout


NEEDED = {
    "grpcio": "legacy-0.14.1",
    "grpcio-observability": "vllm-0.32.0",
    "huggingface_hub": "legacy-0.14.1",
    "numpy": "ubuntu-0.32.0",
    "opentelemetry-api": "vllm-0.32.0",
    "opentelemetry-exporter-prometheus": "vllm-0.32.0",
    "prometheus_client": "vllm-0.32.0",
    "protobuf": "vllm-0.32.0",
    "transformers": "legacy-0.14.1",
}
OTHER_DEVICES = {"cuda-python", "cufile-python", "cupy-cuda13x"}


def by_name(requirements: list[str]) -> dict[str, str]:
    """Package -> requirement."""
    return {re.match(r"[\w.-]+", r)[0]: r.partition(";")[0].strip() for r in requirements}


def of_the_wheel() -> dict[str, str]:
    return by_name([r for r in metadata.requires("lmcache") if "extra ==" not in r])


@pytest.mark.parametrize(("name", "base"), NEEDED.items())
def test_each_bound_that_was_left_out_fails_a_base(layout, pythons, name, base, tmp_path):
    def with_bound(text: str) -> str:
        before, head, ours = text.partition("requires-dist = [\n")
        ours = re.sub(rf'    "{name}[^\w-].*\n', "", ours)
        return f'{before}{head}    "{of_the_wheel()[name]}",\n{ours}'

    project = with_requirements(layout, tmp_path / "project", with_bound)
    done = install(project, pythons[base], *real(base))
    assert done.returncode != 0
    assert "No solution found" in done.stdout
    assert name.replace("_", "-") in done.stdout


def test_the_requirements_are_the_wheels_but_for_those():
    """A new LMCache has a new list, to be read again."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [entry] = config["tool"]["uv"]["dependency-metadata"]
    ours, theirs = by_name(entry["requires-dist"]), of_the_wheel()
    assert "version" not in entry  # of all that are accepted
    pinned = f"lmcache=={metadata.version('lmcache')}"
    assert config["project"]["optional-dependencies"]["lmcache"] == [pinned]
    assert {n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)} == (
        NEEDED.keys() | OTHER_DEVICES
    )


def test_an_lmcache_of_another_version_is_replaced(layout, tmp_path):
    """As llm-d's image has one."""
    python = make_base("vllm-0.32.0", tmp_path / "environment", lmcache="0.5.0")
    done = install(layout, python)
    assert done.returncode == 0, done.stdout
    assert " - lmcache==0.5.0" in done.stdout
    assert changed(done.stdout)["lmcache"] in versions.TESTED["lmcache"]


@pytest.mark.parametrize("version", versions.TESTED["lmcache"])
def test_one_variable_chooses_any_accepted_lmcache(layout, pythons, monkeypatch, version):
    monkeypatch.setenv("LMCACHE_VERSION", version)
    done = install(layout, pythons["vllm-0.32.0"])
    assert done.returncode == 0, done.stdout
    assert f" + lmcache=={version}" in done.stdout
    assert not changed(done.stdout).keys() & pins("vllm-0.32.0").keys()


def test_without_uv_pip_fetches_it(layout, tmp_path):
    """For somebody with pip alone; uv does not stay."""
    python = make_base("vllm-0.32.0", tmp_path / "environment", with_pip=True)
    env = environment() | {"PATH": "/usr/bin:/bin"}
    if shutil.which("uv", path=env["PATH"]):
        pytest.skip("uv is one of the system's programs here")
    before = set(python.parent.iterdir())
    done = run(str(python), str(layout / "scripts/install.py"), "--dry-run", env=env)
    assert done.returncode == 0, done.stdout
    assert changed(done.stdout)["lmcache"] in versions.TESTED["lmcache"]
    assert set(python.parent.iterdir()) == before


def test_a_python_without_vllm_is_refused(layout, tmp_path):
    venv.create(tmp_path / "environment", symlinks=True)
    done = install(layout, tmp_path / "environment/bin/python")
    assert done.returncode == 1
    assert "install: no vLLM for" in done.stdout
    assert "Run this with the Python that has it" in done.stdout


def test_the_readme_prints_this_line():
    assert "\n    python3 scripts/install.py " in (ROOT / "README.md").read_text()
