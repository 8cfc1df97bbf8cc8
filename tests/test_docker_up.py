"""`make up`, `make up-cpu`, `make down` and `make logs`, with a program in Docker's place."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmcache_xpu.harness.engine_process import free_port

ROOT = Path(__file__).resolve().parents[1]
DOCKER = """\
#!{python}
import json, os, sys, time
words, crashes = sys.argv[1:], {crashes}
if words == ["compose", "version", "--short"]:
    print("{version}")
with open("{log}", "a") as log:
    names = ("COMPOSE_PROFILES", "RENDER_GID")
    print(json.dumps([words, {{name: os.environ.get(name) for name in names}}]), file=log)
looks = open("{log}").read().count('"inspect"')
if "build" in words:
    sys.exit({build_code})
if crashes is not None and "ps" in words:
    print("c0ffee")
if crashes is not None and "inspect" in words:
    print("c0ffee", 5 + crashes * (looks - 1))  # 5 times in earlier days
if crashes is not None and "--wait" in words:
    time.sleep(0 if {code} else 3)
    sys.exit({code})
"""


class Project:
    """A clone that was just made, with what a new user copies, on a machine without Docker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "docker.log"
        self.dri = folder / "dri"
        self.dri.mkdir(parents=True)
        shutil.copytree(ROOT / "docker", folder / "docker")
        for name in ("Makefile", "compose.yaml"):
            shutil.copy(ROOT / name, folder)
        shutil.copy(ROOT / ".env.example", folder / ".env")
        # Ports of their own, so that what runs on this machine does not count.
        for name in ("API_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "ROUTER_PORT", "LOADTEST_PORT"):
            self.set(name, free_port())
        self.install("2.26.1")

    def install(
        self, version: str, *, crashes: int | None = None, code: int = 0, build_code: int = 0
    ) -> None:
        """Put a Docker with this version of Compose onto the path.

        Args:
            version: of Compose.
            crashes: how often its one container ends between two looks at it, while a start waits.
            code: what the start ends with; another than 0 at once.
            build_code: what a build ends with.
        """
        (self.folder / "bin").mkdir(exist_ok=True)
        program = self.folder / "bin/docker"
        text = DOCKER.format(
            python=sys.executable,
            version=version,
            log=self.log,
            crashes=crashes,
            code=code,
            build_code=build_code,
        )
        program.write_text(text)
        program.chmod(0o755)

    def set(self, name: str, value: object) -> None:
        with (self.folder / ".env").open("a") as file:
            file.write(f"{name}={value}\n")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": path, "DRI_DIR": str(self.dri)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, word: str) -> list[tuple[list[str], dict[str, str | None]]]:
        """The calls of Docker with this word: arguments, and variables that matter."""
        calls = map(json.loads, self.log.read_text().splitlines()) if self.log.exists() else ()
        return [(words, variables) for words, variables in calls if word in words]


def profiles(words: list[str]) -> set[str]:
    return {value for flag, value in itertools.pairwise(words) if flag == "--profile"}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "clone")


@pytest.mark.parametrize("gpu", [True, False], ids=["a GPU", "no GPU"])
def test_up_cpu_starts_the_engine_on_cpu_with_the_example(project, gpu):
    if gpu:
        (project.dri / "renderD128").touch()
    done = project.run("make", "up-cpu")
    assert done.returncode == 0, done.stderr
    [(words, variables)] = project.calls("--wait")
    assert profiles(words) == {"cpu", "monitoring"}
    assert variables["COMPOSE_PROFILES"] == ""


def test_up_starts_the_engine_on_the_gpu_with_the_group_of_its_node(project):
    (project.dri / "renderD128").touch()
    done = project.run("make", "up")
    assert done.returncode == 0, done.stderr
    [(words, variables)] = project.calls("--wait")
    assert profiles(words) == {"xpu", "monitoring"}
    assert variables["RENDER_GID"] == str((project.dri / "renderD128").stat().st_gid)


def test_up_without_a_gpu_says_so_and_starts_nothing(project):
    done = project.run("make", "up")
    assert done.returncode
    assert f"no {project.dri}/renderD* on this machine" in done.stderr
    assert "make up-cpu" in done.stderr
    assert project.calls("--wait") == []


@pytest.mark.parametrize("name", ["TENSOR", "PIPELINE"])
def test_an_engine_of_several_gpus_starts_with_the_right_that_it_needs(project, name):
    """Without it oneCCL may hang until `make up` gives up, half an hour later."""
    (project.dri / "renderD128").touch()
    project.set(f"LMCACHE_XPU_{name}_PARALLEL", 2)
    assert project.run("docker/up", "cpu").returncode == 0
    done = project.run("docker/up", "xpu")
    assert done.returncode == 1
    assert done.stderr.startswith("up: an engine of 2 GPUs needs a right")
    [line] = re.findall(r"Put (COMPOSE_FILE=(?:\S+)) into .env", done.stderr)
    project.set(*line.split("="))
    assert project.run("docker/up", "xpu").returncode == 0
    for file in line.split("=")[1].split(":"):
        assert (project.folder / file).is_file()


@pytest.mark.parametrize(
    ("device", "configured", "started"),
    [
        ("cpu", "xpu,xpu-2,router", {"cpu", "cpu-2", "router"}),
        ("cpu", "cpu,loadtest", {"cpu", "loadtest"}),
        ("xpu", "cpu,cpu-2", {"xpu", "xpu-2"}),
        ("cpu", '"xpu,monitoring" # quoted', {"cpu", "monitoring"}),
        ("cpu", "", {"cpu"}),
    ],
)
def test_the_engines_of_the_settings_are_on_the_device_that_was_named(
    project, device, configured, started
):
    (project.dri / "renderD128").touch()
    project.set("COMPOSE_PROFILES", configured)
    done = project.run("docker/up", device)
    assert done.returncode == 0, done.stderr
    [(words, _)] = project.calls("--wait")
    assert profiles(words) == started


def test_up_wants_a_device(project):
    done = project.run("docker/up", "monitoring")
    assert done.returncode == 1
    assert done.stderr.startswith("up: xpu or cpu has to be named first.")


def test_a_port_that_is_taken_is_named(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        project.set("GRAFANA_PORT", port)
        done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert f"something listens on port {port} already" in done.stderr
    assert "Set GRAFANA_PORT in .env" in done.stderr


@pytest.mark.parametrize("make", ["up-cpu", "up"])
def test_images_are_built_before_each_start(project, make):
    """After `git pull`, or with another BASE_IMAGE, the one that is there is an old one."""
    (project.dri / "renderD128").touch()
    for _ in range(2):
        assert project.run("make", make).returncode == 0
    steps = [word for words, _ in project.calls("compose") for word in words if word in STEPS]
    assert steps == ["build", "--wait"] * 2
    for (build, _), (up, _) in zip(project.calls("build"), project.calls("--wait"), strict=True):
        assert profiles(build) == profiles(up)


STEPS = ("build", "--wait")


def test_without_a_build_no_old_image_is_started(project):
    project.install("2.26.1", build_code=1)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert "the images could not be built" in done.stderr
    assert "PULL_POLICY=never in .env" in done.stderr
    assert project.calls("--wait") == []


def test_images_that_are_there_are_started_where_the_settings_say_so(project):
    project.set("PULL_POLICY", "never")
    project.install("2.26.1", build_code=1)
    assert project.run("docker/up", "cpu").returncode == 0
    assert (project.calls("build"), len(project.calls("--wait"))) == ([], 1)


SECRETS = ("LMCACHE_XPU_API_KEY", "LMCACHE_XPU_REMOTE_PASSWORD", "HF_TOKEN")


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(
    "value", ["ab$cd", "ab #cd", "#ab", "ab cd", '"ab$cd"', '"a\\nb"', "'ab", "'a'b'", "a${HOME}"]
)
def test_a_secret_that_compose_would_cut_is_refused_with_the_way_to_write_it(project, name, value):
    project.set(name, value)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert f"Write it in single quotes, {name}='...'" in done.stderr
    assert value not in done.stderr
    assert project.calls("--wait") == []


@pytest.mark.parametrize(
    "value",
    ["-ab,c", "ab#c", "'ab$cd #e\"f\\g'", "'a' # a note", '"a b"', "", "sk-0_1.2~3+4/5=", "a'b"],
)
def test_other_secrets_are_taken(project, value):
    for name in SECRETS:
        project.set(name, value)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["clé", "' k'", "'k '", "'a\tb'"])
def test_an_api_key_that_no_header_can_hold_is_refused(project, value):
    project.set("LMCACHE_XPU_API_KEY", value)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert "LMCACHE_XPU_API_KEY can't be sent in an HTTP header" in done.stderr


@pytest.mark.parametrize(("crashes", "code"), [(2, 0), (1, 1)])
def test_an_engine_that_only_crashes_is_stopped_and_said(project, crashes, code):
    """Compose may say so at the first crash, or wait; Docker would start it again for ever."""
    project.install("2.26.1", crashes=crashes, code=code)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert "the stack did not become healthy" in done.stderr
    assert [words for words, _ in project.calls("stop")] == [["stop", "c0ffee"]]


@pytest.mark.parametrize("code", [0, 1])
def test_crashes_of_earlier_days_are_not_counted(project, code):
    """What is only slow goes on."""
    project.install("2.26.1", crashes=0, code=code)
    done = project.run("docker/up", "cpu")
    assert done.returncode == code, done.stderr
    assert project.calls("stop") == []


@pytest.mark.parametrize("target", ["up", "up-cpu", "down", "logs"])
@pytest.mark.parametrize("version", ["", "2.23.3"])
def test_without_compose_one_line_says_what_to_install(project, target, version):
    project.install(version)
    done = project.run("make", "-s", target)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert said == [
        "no Docker Compose 2.24 or newer here. Install the package docker-compose-plugin."
    ]
    assert done.returncode
    assert all(words[1] == "version" for words, _ in project.calls("compose"))


@pytest.mark.parametrize("target", ["down", "logs"])
def test_down_and_logs_are_for_all_profiles(project, target):
    done = project.run("make", target)
    assert done.returncode == 0, done.stderr
    [(words, _)] = project.calls(target)
    assert profiles(words) == {"*"}


def test_a_shared_tier_without_a_password_is_not_started(project):
    (project.dri / "renderD128").touch()
    project.set("COMPOSE_PROFILES", "xpu,shared-cache")
    run = project.run("make", "up")
    assert run.returncode != 0
    assert "shared-cache needs LMCACHE_XPU_REMOTE_PASSWORD" in run.stderr
    assert not project.calls("up")
    project.set("LMCACHE_XPU_REMOTE_PASSWORD", "p" * 48)
    assert project.run("make", "up").returncode == 0


@pytest.mark.skipif(not shutil.which("sh"), reason="needs sh")
@pytest.mark.parametrize("password", ["", "secret"])
def test_nor_does_its_container_start_without_one(tmp_path, password):
    """Whoever calls `docker compose` alone passes by `docker/up`."""
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["valkey"]["command"]
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\nexec cat\n")
    server.chmod(0o755)
    script = command[2].replace("$$", "$").replace("${SHARED_CACHE_MB:-8192}", "1")
    run = subprocess.run(
        [*command[:2], script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PASSWORD": password},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout.strip()) == (
        (0, 'requirepass "secret"') if password else (1, "")
    )
