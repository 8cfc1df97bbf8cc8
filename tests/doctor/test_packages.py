"""`lmcache-xpu doctor` sees when the packages that vLLM and LMCache share were taken back."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.installation import environment, pins, run

from lmcache_xpu import versions
from lmcache_xpu.doctor.packages import Package, check_packages, installed
from lmcache_xpu.versions import IMAGE_PACKAGES

# What a plain `pip install lmcache==0.5.6` leaves.
TAKEN_BACK = {
    "grpcio": "1.78.0",
    "grpcio-status": "1.78.0",
    "opentelemetry-api": "1.40.0",
    "opentelemetry-exporter-otlp": "1.40.0",
    "opentelemetry-exporter-prometheus": "0.61b0",
    "opentelemetry-sdk": "1.40.0",
    "prometheus-client": "0.24.1",
    "protobuf": "6.33.6",
}


def packages(shared, vllm="0.32.0+xpu", requires=()):
    installed = {name: Package(version) for name, version in shared.items()}
    return {**installed, "vllm": Package(vllm, requires), "other": Package("1", ("protobuf<1",))}


def test_each_accepted_vllm_has_its_images_packages():
    assert IMAGE_PACKAGES.keys() >= set(versions.TESTED["vllm"])
    for version, shared in IMAGE_PACKAGES.items():
        image = pins(f"vllm-{version}")
        assert {name: image[name] for name in shared if name in image}.items() <= shared.items()
        # Those that LMCache brings.
        assert shared.keys() - image.keys() == {
            "grpcio-status",
            "opentelemetry-exporter-prometheus",
        }


def test_packages_of_the_image_and_younger_ones():
    image = IMAGE_PACKAGES["0.32.0"]
    assert check_packages(packages(image)).outcome == "ok"
    assert check_packages(packages({**image, "protobuf": "7.36.2"})).outcome == "ok"
    assert "protobuf 7.35.1" in check_packages(packages(image)).found


def test_packages_that_were_taken_back():
    check = check_packages(packages(TAKEN_BACK))
    assert check.outcome == "warn"
    for name, version in TAKEN_BACK.items():
        assert f"{name} {version}, older than" in check.found
        assert f"'{name}=={IMAGE_PACKAGES['0.32.0'][name]}'" in check.advice
    assert "python3 scripts/install.py" in check.advice


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.0+cu130", "0.14.1+xpu"])
def test_other_vllms_are_held_to_what_they_ask_for_alone(vllm):
    assert check_packages(packages(TAKEN_BACK, vllm=vllm)).outcome == "ok"


def test_what_vllm_asks_for():
    requires = (
        'protobuf>=6.33.5; python_version > "3"',
        'protobuf==1; platform_machine == "none"',
        'grpcio<1; extra == "other"',
        "numpy",
    )
    older = {**IMAGE_PACKAGES["0.32.0"], "protobuf": "6.31.1"}
    check = check_packages(packages(older, vllm="0.32.0+cpu", requires=requires))
    assert check.outcome == "fail"
    assert check.found == "vllm 0.32.0+cpu wants protobuf>=6.33.5, and here is 6.31.1"
    assert "pip install 'protobuf>=6.33.5'" in check.advice


def test_what_the_shared_packages_ask_of_each_other():
    installed = packages(IMAGE_PACKAGES["0.32.0"])
    installed["opentelemetry-sdk"] = Package("1.44.0", ("opentelemetry-api==1.45.0",))
    check = check_packages(installed)
    assert check.outcome == "warn"
    assert "opentelemetry-sdk 1.44.0 wants opentelemetry-api==1.45.0" in check.found


def test_a_vllm_without_metadata():
    assert check_packages({"protobuf": Package("7.35.1")}).outcome == "skip"


def test_this_environment():
    assert check_packages(installed()).outcome == "ok"


def test_the_advice_repairs(tmp_path: Path):
    """Packages as a plain pip leaves them; then what the check says; then the check again."""
    run("uv", "venv", "-q", "-p", sys.executable, str(tmp_path / "environment"))
    python = str(tmp_path / "environment/bin/python")
    [site] = tmp_path.glob("environment/lib/python3*/site-packages")

    def uv(*arguments: str) -> None:
        done = run("uv", "pip", "install", "--python", python, *arguments, env=environment())
        assert done.returncode == 0, done.stdout

    def check():
        there = {
            each.name.lower().replace("_", "-"): Package(each.version, tuple(each.requires or ()))
            for each in metadata.distributions(path=[str(site)])
        }
        return check_packages({**there, "vllm": Package("0.32.0+xpu")})

    uv(*(f"{name}=={version}" for name, version in TAKEN_BACK.items()))
    taken_back = check()
    assert taken_back.outcome == "warn"
    command = taken_back.advice.partition(". A plain")[0]
    uv(*shlex.split(command.removeprefix("pip install ")))
    repaired = check()
    assert repaired.outcome == "ok", repaired
    assert "protobuf 7.35.1" in repaired.found
