"""What `make up` says, in one line, where it does not start."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess

import pytest
import yaml
from support.docker_project import ROOT, one_line


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


@pytest.mark.parametrize("target", ["up", "up-cpu", "down", "logs"])
@pytest.mark.parametrize("version", ["", "2.23.3"])
def test_without_compose_one_line_says_what_to_install(project, target, version):
    project.install(version)
    done = project.run("make", "-s", target)
    assert one_line(done) == (
        "no Docker Compose 2.24 or newer here. Install docker-compose-plugin (Docker's packages), "
        "docker-compose-v2 (Ubuntu) or docker-compose (Debian 13)."
    )
    assert done.returncode
    assert all(words[1] == "version" for words, _ in project.calls("compose"))


@pytest.mark.parametrize("target", ["up", "down"])
def test_without_docker_one_line_names_the_page_with_its_packages(project, target):
    for name in ("bash", "env", "dirname", "make", "grep"):  # and no docker, wherever this one is
        (project.folder / "bin" / name).symlink_to(shutil.which(name))
    (project.folder / "bin/docker").unlink()
    done = project.run("make", "-s", target, path=str(project.folder / "bin"))
    assert done.returncode
    assert one_line(done).startswith(
        "no program docker here. Install Docker, its Compose and buildx"
    )


@pytest.mark.parametrize("target", ["up-cpu", "logs"])
def test_podman_by_the_name_of_docker_is_refused(project, target):
    project.install(answers={"--version": (0, "podman version 4.3.1")})
    done = project.run("make", "-s", target)
    assert done.returncode
    assert "the program docker is Podman here" in one_line(done)
    assert project.calls("compose") == []


NO_DAEMON = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"
NOT_MINE = "permission denied while trying to connect to the Docker daemon socket at unix:///x"
NO_HOST = 'Get "https://images.example.com/v2/": dial tcp: lookup images.example.com: no such host'
NO_INDEX = (
    "error: Failed to fetch: `https://index.example.com/uv/`: dns error: failed to look it up"
)
NO_ARCHIVE = "Err:1 http://deb.example.com/debian InRelease Could not connect to deb.example.com:80"
DENIED = "pull access denied for debian-mine, repository does not exist or needs 'docker login'"
GONE = "failed to solve: example.com/base:1: example.com/base:1: not found"


@pytest.mark.parametrize("target", ["up", "up-cpu"])
@pytest.mark.parametrize(
    ("call", "text", "said", "advice"),
    [
        ("version --format", NO_DAEMON, "no Docker daemon answers.", "sudo systemctl start docker"),
        ("version --format", NOT_MINE, "this user may not use Docker.", "sudo usermod -aG docker"),
        ("pull", NO_HOST, "pulling prom/prometheus:v3.5.0 needs a network: dial", "PULL_POLICY="),
        ("build", NO_HOST, "the build needs a network: dial tcp: lookup", "PULL_POLICY=never"),
        ("build", NO_INDEX, "the build needs a network: dns error", "mirrors"),
        ("build", NO_ARCHIVE, "the build needs a network: Could not connect to deb.", "mirrors"),
        ("pull", DENIED, "an image can't be pulled: pull access denied", "another in"),
        ("build", GONE, "an image can't be pulled: example.com/base:1: not found", "docker login"),
        ("buildx version", "unknown command", "no buildx here", "docker-buildx-plugin"),
    ],
)
def test_a_start_that_lacks_something_says_what_to_do_in_one_line(
    project, target, call, text, said, advice
):
    (project.dri / "renderD128").touch()
    missing = {"config --images": (0, "prom/prometheus:v3.5.0"), "image inspect": (1, "none")}
    project.install(answers={**missing, call: (1, text)})
    done = project.run("make", "-s", target)
    assert done.returncode
    assert one_line(done).startswith(f"up: {said}")
    assert advice in one_line(done)
    assert project.calls("--wait") == []


def test_podman_behind_dockers_program_is_refused(project):
    project.install(answers={"version --format": (0, "Podman Engine Conmon OCI Runtime (crun) ")})
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert one_line(done).startswith("up: Podman answers in Docker's place")
    assert project.calls("--wait") == []


def test_rootless_docker_is_refused_for_a_gpu_and_taken_on_cpu(project):
    (project.dri / "renderD128").touch()
    project.install(answers={"info": (0, "[name=seccomp,profile=builtin name=rootless]")})
    done = project.run("docker/up", "xpu")
    assert done.returncode == 1
    assert one_line(done).startswith("up: Docker is rootless")
    assert "make up-cpu" in one_line(done)
    assert project.calls("--wait") == []
    assert project.run("docker/up", "cpu").returncode == 0


IMAGES = {"config --images": (0, "lmcache-xpu/cpu:0.1.0\nprom/prometheus:v3.5.0")}


def test_images_that_are_not_here_and_are_not_made_are_named(project):
    project.set("PULL_POLICY", "never")
    project.install(answers={**IMAGES, "image inspect": (1, "none")})
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert one_line(done).startswith("up: no image lmcache-xpu/cpu:0.1.0 here, and PULL_POLICY=nev")
    assert (project.calls("pull"), project.calls("--wait")) == ([], [])


@pytest.mark.parametrize("policy", ["build", "missing"])
def test_what_is_not_here_is_pulled_before_the_start_and_nothing_else(project, policy):
    """A built image is here by then; a pull of ours is one from a registry of yours."""
    project.set("PULL_POLICY", policy)
    absent = {"image inspect prom/prometheus:v3.5.0": (1, "none")}
    project.install(answers={**IMAGES, **absent})
    assert project.run("docker/up", "cpu").returncode == 0
    assert [words for words, _ in project.calls("pull")] == [["pull", "prom/prometheus:v3.5.0"]]
    assert bool(project.calls("build")) is (policy == "build")


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
