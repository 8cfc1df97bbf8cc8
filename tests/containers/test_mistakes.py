"""A wrong value stops the stack with a message that says what to change."""

from __future__ import annotations

import json
import socket

import pytest
from docker_host import BASE
from stack import tag


@pytest.fixture(scope="module")
def stack(make_stack):
    return make_stack()


def run(stack, *options: str, command: tuple[str, ...] = ()):
    return stack.compose("run", "--rm", "--no-deps", *options, "engine-cpu", *command, check=False)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LMCACHE_XPU_CPU_GIB", "100000", "Lower cpu_gib"),
        ("LMCACHE_XPU_MODEL", "/models/none", "model=/models/none"),
        ("LMCACHE_XPU_CHUNK_TOKENS", "100", "multiple of block_tokens"),
        ("LMCACHE_XPU_DEVICE", "xpu", "expected cpu"),
        ("LMCACHE_XPU_CPU_GB", "8", "LMCACHE_XPU_CPU_GIB"),
        ("LMCACHE_CHUNK_SIZE", "64", "Unset LMCACHE_CHUNK_SIZE"),
    ],
)
def test_a_wrong_value_of_the_engine(stack, name, value, said):
    done = run(stack, "-e", f"{name}={value}")
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_a_disk_tier_that_the_engine_may_not_write(stack, tmp_path):
    done = run(stack, "-v", f"{tmp_path}:/var/cache/kv:ro")
    assert done.returncode == 2
    assert "disk_path /var/cache/kv, which can't be written" in done.stdout
    assert "may write to" in done.stdout


def test_the_stack_says_so_too_and_does_not_try_for_ever(make_stack):
    stack = make_stack(LMCACHE_XPU_CPU_GIB="100000")
    done = stack.up("cpu", check=False)
    assert done.returncode
    assert "Lower cpu_gib" in done.stdout
    assert "did not become healthy" in done.stdout
    stack.down()


def test_an_image_of_yesterday_is_not_started(make_stack):
    """Its files changed, or its base: it is built anew, or the start ends with the cause."""
    stack = make_stack(
        PULL_POLICY="build", CPU_TAG=tag("yesterday"), BASE_IMAGE=BASE, STOP_GRACE="1s"
    )
    (stack.folder / "docker/Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS cpu\nCOPY day /\n"
        'ENTRYPOINT ["sh", "-c", "trap exit TERM; sleep 600 & wait"]\n'
    )
    for day in ("yesterday", "today"):
        (stack.folder / "day").write_text(day)
        stack.up("cpu")
        assert stack.compose("exec", "-T", "engine-cpu", "cat", "/day").stdout == day
    with (stack.folder / ".env").open("a") as file:
        file.write("BASE_IMAGE=127.0.0.1:1/none\n")
    done = stack.up("cpu", check=False)
    assert done.returncode
    assert "the build needs a network" in done.stdout
    stack.down()


def test_no_model(make_stack):
    done = make_stack(LMCACHE_XPU_MODEL="").up("cpu", check=False)
    assert done.returncode == 1
    assert "LMCACHE_XPU_MODEL is not set" in done.stdout


def test_a_port_that_is_taken(stack):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", stack.ports["API_PORT"]))
        taken.listen()
        done = stack.up("cpu", check=False)
    assert done.returncode == 1
    assert f"something listens on port {stack.ports['API_PORT']}" in done.stdout
    assert "Set API_PORT in .env" in done.stdout


def test_no_render_node(stack):
    done = stack.up("xpu", check=False)
    assert done.returncode == 1
    assert "no /dev/dri/renderD*" in done.stdout
    assert "make up-cpu" in done.stdout


def test_the_doctor_in_the_container(stack):
    done = run(stack, command=("doctor", "--json"))
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert report["ok"], report
    assert outcomes["disk tier"] in ("ok", "warn")
    assert outcomes["model"] == "ok"
