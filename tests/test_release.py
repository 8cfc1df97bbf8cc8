"""The release workflow publishes what the chart names, signed, from pinned actions."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lmcache_xpu import __version__

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / ".github/workflows/release.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)
BAKE = (ROOT / "docker-bake.hcl").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
JOBS = WORKFLOW["jobs"]


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


def test_every_image_that_the_chart_names_is_built_and_signed():
    schema = json.loads((ROOT / "helm/lmcache-xpu/values.schema.json").read_text())
    digests = schema["$defs"]["Image"]["properties"]["digests"]
    [group] = re.findall(r'^group "release" \{ targets = (\[.*\]) \}$', BAKE, re.MULTILINE)
    built = JOBS["images"]["strategy"]["matrix"]["image"]
    assert set(built) == set(json.loads(group)) >= set(digests["propertyNames"]["enum"])
    script = commands("images")
    assert 'bake --push --metadata-file built.json "$IMAGE"' in script
    assert 'cosign sign --yes "$REGISTRY/$IMAGE@$digest"' in script
    assert "cosign sign" in commands("chart")


def test_every_action_is_pinned_by_its_commit():
    uses = re.findall(r"uses: (.*)$", TEXT, re.MULTILINE)
    assert len(uses) == sum("uses" in step for job in JOBS.values() for step in job["steps"])
    for line in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_a_job_may_do_what_it_needs_and_no_more():
    assert WORKFLOW["permissions"] == {}
    push = {"contents": "read", "packages": "write", "id-token": "write"}
    rights = {name: job["permissions"] for name, job in JOBS.items()}
    assert rights == {
        "bases": {"contents": "read"},
        "images": push,
        "chart": push,
        "wheel": {"contents": "write"},
    }
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash"  # a failure within a pipe ends the job
    for job in JOBS.values():
        # What comes from outside reaches a shell as a variable, never as its text.
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")]


@pytest.mark.parametrize(("tag", "code"), [(f"v{__version__}", 0), ("v9.9.9", 1), ("main", 1)])
def test_only_the_tag_of_the_packages_version_is_released(tag, code):
    [script] = [step["run"] for step in JOBS["bases"]["steps"] if "version" in step.get("name", "")]
    environment = {**os.environ, "TAG_NAME": tag}
    done = subprocess.run(["bash", "-ec", script], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == code


def docker(folder: Path) -> dict[str, str]:
    """An environment whose `docker` answers each question with a digest of its own."""
    program = folder / "docker"
    program.write_text('#!/bin/sh\necho "sha256:$(echo "$4" | sha256sum | cut -c1-64)"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_each_image_has_a_digest_that_pins_it(tmp_path):
    def digests(*names: str, **variables: str) -> subprocess.CompletedProcess[str]:
        script, environ = ROOT / "docker/digests", docker(tmp_path) | variables
        return subprocess.run([script, *names], env=environ, capture_output=True, text=True)

    lines = dict(line.split("=") for line in digests().stdout.splitlines())
    named = re.findall(r'\{([A-Z]+_IMAGE):-|"([A-Z]+_IMAGE)"', COMPOSE + BAKE)
    assert lines.keys() == {name for pair in named for name in pair if name}
    assert len(set(lines.values())) == len(lines) == 10
    for value in lines.values():
        assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", value), value
    other = digests("XPU_IMAGE", VLLM_VERSION="0.29.0").stdout
    assert other.startswith("XPU_IMAGE=vllm/vllm-openai-xpu:v0.29.0@sha256:")
    again = digests("XPU_IMAGE", XPU_IMAGE="mirror/xpu:1@sha256:00").stdout
    assert again.startswith("XPU_IMAGE=mirror/xpu:1@sha256:")
    assert again.count("@") == 1
    done = digests("XPU")
    assert done.returncode == 2
    assert "XPU names no image; expected one of: BASE_IMAGE" in done.stderr
    [released] = re.findall(r"docker/digests (.*) \|", commands("bases"))
    assert released.split() == ["BASE_IMAGE", "XPU_IMAGE"]


def test_a_release_has_sbom_and_provenance():
    assert 'attest = RELEASE == "" ? [] : ["type=sbom", "type=provenance,mode=max"]' in BAKE
    [build] = [step for step in JOBS["images"]["steps"] if "run" in step]
    assert build["env"]["RELEASE"] == "1"
