"""`make up`, `make up-cpu`, `make down` and `make logs`, with a program in Docker's place."""

from __future__ import annotations

import pytest
from support.docker_project import one_line, profiles

STEPS = ("build", "--wait")


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


def test_without_a_build_no_old_image_is_started(project):
    project.install(answers={"build": (1, "g++: error")})
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert "g++: error" in done.stdout
    assert one_line(done) == (
        "up: the build failed; the cause is above. "
        "PULL_POLICY=never in .env starts the images that are here, as they are."
    )
    assert project.calls("--wait") == []


def test_images_that_are_there_are_started_where_the_settings_say_so(project):
    project.set("PULL_POLICY", "never")
    project.install(answers={"build": (1, "")})
    assert project.run("docker/up", "cpu").returncode == 0
    assert (project.calls("build"), len(project.calls("--wait"))) == ([], 1)


@pytest.mark.parametrize(("crashes", "code"), [(2, 0), (1, 1)])
def test_an_engine_that_only_crashes_is_stopped_and_said(project, crashes, code):
    """Compose may say so at the first crash, or wait; Docker would start it again for ever."""
    project.install(crashes=crashes, code=code)
    done = project.run("docker/up", "cpu")
    assert done.returncode == 1
    assert "the stack did not become healthy" in done.stderr
    assert [words for words, _ in project.calls("stop")] == [["stop", "c0ffee"]]


@pytest.mark.parametrize("code", [0, 1])
def test_crashes_of_earlier_days_are_not_counted(project, code):
    """What is only slow goes on."""
    project.install(crashes=0, code=code)
    done = project.run("docker/up", "cpu")
    assert done.returncode == code, done.stderr
    assert project.calls("stop") == []


@pytest.mark.parametrize("target", ["down", "logs"])
def test_down_and_logs_are_for_all_profiles(project, target):
    done = project.run("make", target)
    assert done.returncode == 0, done.stderr
    [(words, _)] = project.calls(target)
    assert profiles(words) == {"*"}
