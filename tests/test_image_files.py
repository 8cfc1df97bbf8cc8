"""The files that images are built from agree with each other and with the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.container_files import COMPOSE, DOCKERFILE, EXAMPLE, ROOT, SERVICES

from lmcache_xpu import __version__, versions


@pytest.mark.parametrize("file", ["docker/Dockerfile", "tests/containers/standins.Dockerfile"])
def test_hadolint_has_nothing_to_say(file):
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, ROOT / file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_versions_are_those_of_the_package():
    environment = (ROOT / "scripts/environment.py").read_text()
    assert f'UV = "uv=={re.search(r"UV_VERSION=(.*)", DOCKERFILE)[1]}"' in environment
    bake = (ROOT / "docker-bake.hcl").read_text()
    for text in (DOCKERFILE, COMPOSE, EXAMPLE, bake):
        for version in re.findall(r"vllm-openai-xpu:v([\d.]+)", text):
            assert version in versions.TESTED["vllm"]
    assert re.search(r"ARG VLLM_VERSION=(.*)", DOCKERFILE)[1] in versions.TESTED["vllm"]
    for text in (COMPOSE, EXAMPLE, bake):
        assert set(re.findall(r"lmcache-xpu/\w+:([\d.]+)", text)) <= {__version__}
    assert f'"{__version__}"' in bake
    assert set(re.findall(r'VLLM_VERSION.*?"([\d.]+)"', bake)) <= set(versions.TESTED["vllm"])


def test_bake_builds_what_the_dockerfile_and_the_stack_have():
    bake = (ROOT / "docker-bake.hcl").read_text()
    targets = set(re.findall(r'^target "([a-z-]+)"', bake, re.MULTILINE))
    others = {f"xpu-{name}" for name in ("llm-scaler", "llm-d", "ubi", "ubuntu")}
    assert targets == {"wheel", "xpu", "cpu", "loadtest", "router"} | others
    stages = set(re.findall(r"^FROM .* AS ([a-z-]+)$", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r'target += "([a-z]+)"', bake)) <= stages
    built = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert built <= set(re.findall(r'target += "([a-z]+)"', bake))


def test_what_the_images_copy_reaches_their_build():
    """Docker is handed only what .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {name for names in copies for name in names.split()}
    copied |= set(re.findall(r"type=bind,source=([^,]+),", DOCKERFILE))
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


def stage(name):
    """The lines of one stage of the Dockerfile."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    [text] = [part for part in stages if f" AS {name}\n" in part]
    return text


def test_every_image_with_an_engine_checks_itself_last():
    for name in ("cpu", "xpu"):
        steps = re.findall(r"^RUN (?:.*\\\n)*.*$", stage(name), re.MULTILINE)
        assert "lmcache-xpu doctor --build" in steps[-1]


def test_the_program_in_an_image_has_oneapis_environment(tmp_path):
    """Also where nothing has read its scripts, and where there are none."""
    programs, oneapi = tmp_path / "bin", tmp_path / "oneapi"
    programs.mkdir()
    echo = 'echo "$ONEAPI_READ" "$@"'
    for name, line in {"vllm": ":", "lmcache-xpu": echo, "lmcache": echo}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "ONEAPI_ROOT": str(oneapi)}
    program = (ROOT / "docker/lmcache-xpu", "serve", "a b")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (" serve a b\n", "")
    script = ROOT / "tests/containers/setvars.sh"
    (oneapi / "ccl/latest/env").mkdir(parents=True)
    shutil.copy(script, oneapi)
    shutil.copy(script, oneapi / "ccl/latest/env/vars.sh")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    scripts = (f"{oneapi}/{name} --force;" for name in ("setvars.sh", "ccl/latest/env/vars.sh"))
    assert done.stdout == f"{''.join(scripts)} serve a b\n"
    (tmp_path / "lmcache").symlink_to(ROOT / "docker/lmcache-xpu")
    program = (tmp_path / "lmcache", "server")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" server\n")


def test_bases_of_others_are_taken_as_they_are():
    """None of these has ensurepip, and not each has its Python in the same place."""
    for name in ("ubuntu-vllm", "xpu-install", "xpu"):
        assert "-m venv" not in stage(name)
    for name in ("xpu-install", "xpu"):
        assert "/opt/venv" not in stage(name)


def test_the_program_of_lmcache_in_the_xpu_image_is_the_wrapper_too():
    assert "ln -s lmcache-xpu bin/lmcache" in stage("xpu")
    for name in ("xpu", "cpu"):
        assert "docker/cache-server" in stage(name)
