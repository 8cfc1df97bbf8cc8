"""The target xpu on stand-ins for images of others, with an earlier vLLM: `make test PART=bases`.

VLLM names the release; without it these tests are left out, because the builds take minutes.
"""

from __future__ import annotations

import json
import os

import pytest
from stack import tag
from support.image_packages import IMAGE_PACKAGES

from lmcache_xpu.versions import TESTED

VLLM = os.environ.get("VLLM", "")
STANDINS = "tests/containers/standins.Dockerfile"
LMCACHES = ("grpcio-status", "opentelemetry-exporter-prometheus")
pytestmark = pytest.mark.skipif(not VLLM, reason="VLLM names no release")


@pytest.fixture(scope="module")
def make_base(host):
    """Build a base whose vLLM calls itself by a version."""
    host.build(tag("python"), "python")

    def make(release: str) -> str:
        shared = {n: v for n, v in IMAGE_PACKAGES[VLLM].items() if n not in LMCACHES}
        arguments = {
            "CPU_IMAGE": tag("python"),
            "PACKAGES": " ".join(f"{name}=={version}" for name, version in shared.items()),
            "RELEASE": release,
            "VLLM": VLLM,
        }
        options = [o for n, v in arguments.items() for o in ("--build-arg", f"{n}={v}")]
        host.build(tag("of-others"), "vllm-of-others", *options, file=STANDINS)
        return tag("of-others")

    return make


@pytest.fixture(scope="module")
def image(host, make_base):
    name = tag("xpu-of-others")
    allow = [] if VLLM in TESTED["vllm"] else ["--build-arg", "ALLOW_UNTESTED=1"]
    host.build(name, "xpu", "--build-arg", f"XPU_IMAGE={make_base(VLLM)}", *allow)
    return name


def run(host, image: str, *command: str, entrypoint: str = "lmcache-xpu", check: bool = True):
    options = ("--rm", "--network", "none", "--entrypoint", entrypoint)
    return host.run("run", *options, image, *command, check=check)


def test_the_self_check_says_what_is_in_use(host, image):
    shown = run(host, image, "doctor", "--build", "--json").stdout
    print(shown)
    checks = {
        c["name"]: (c["outcome"], c["found"])
        for c in json.loads(shown[shown.index("{\n") :])["checks"]
    }
    accepted = "ok" if VLLM in TESTED["vllm"] else "warn"
    assert checks["versions"][0] == accepted
    assert checks["connector"][0] == checks["patches"][0] == checks["packages"][0] == "ok"
    assert f"vLLM {VLLM}" in checks["versions"][1]


def test_oneapi_is_there_however_the_program_is_called(host, image):
    """Also as the chart does, which names the program and passes the entry point by."""
    look = "cat > /tmp/lmcache-xpu && chmod +x /tmp/lmcache-xpu"
    fake = "#!/bin/sh\necho $ONEAPI_READ"
    script = f"printf '%s' '{fake}' | ({look}) && cp /opt/venv/bin/vllm /tmp && PATH=/tmp:$PATH"
    done = run(host, image, "-c", f"{script} /opt/lmcache-xpu/bin/lmcache-xpu", entrypoint="sh")
    assert done.stdout.strip() == (
        "/opt/intel/oneapi/setvars.sh --force;/opt/intel/oneapi/ccl/latest/env/vars.sh --force;"
    )


def test_a_start_that_fails_ends_the_container(host, image):
    done = run(host, image, "serve", "/models/none", check=False)
    print(done.stdout)
    assert done.returncode == 2
    assert "/models/none" in done.stdout


def test_a_version_that_is_not_accepted_is_refused(host, make_base):
    base = make_base("0.25.1")
    with pytest.raises(pytest.fail.Exception, match=r"vLLM 0\.25\.1") as refused:
        host.build(tag("refused"), "xpu", "--build-arg", f"XPU_IMAGE={base}")
    print(str(refused.value)[-3000:])
