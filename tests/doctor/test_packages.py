"""`lmcache-xpu doctor` sees when the packages that vLLM and LMCache share were taken back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.image_packages import IMAGE_PACKAGES
from support.installation import pins

from lmcache_xpu import versions
from lmcache_xpu.doctor import software
from lmcache_xpu.doctor.software import SHARED, check_packages

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


def package(version: str, *requires: str) -> SimpleNamespace:
    return SimpleNamespace(version=version, requires=list(requires))


def packages(shared, vllm="0.32.0+xpu", requires=()):
    installed = {name: package(version) for name, version in shared.items()}
    return {**installed, "vllm": package(vllm, *requires), "other": package("1", "protobuf<1")}


def test_each_accepted_vllm_has_its_images_packages():
    assert IMAGE_PACKAGES.keys() >= set(versions.TESTED["vllm"])
    for version, shared in IMAGE_PACKAGES.items():
        image = pins(f"vllm-{version}")
        assert {name: image[name] for name in shared if name in image}.items() <= shared.items()
        assert shared.keys() == set(SHARED)
        # Those that LMCache brings.
        assert shared.keys() - image.keys() == {
            "grpcio-status",
            "opentelemetry-exporter-prometheus",
        }


@pytest.mark.parametrize("shared", [IMAGE_PACKAGES["0.32.0"], TAKEN_BACK], ids=["image", "plain"])
def test_packages_that_nobody_asks_to_be_others(shared):
    check = check_packages(packages(shared))
    assert check.outcome == "ok"
    assert f"protobuf {shared['protobuf']}" in check.found


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
    assert "python3 scripts/install.py" in check.advice


def test_what_the_shared_packages_ask_of_each_other():
    installed = packages(IMAGE_PACKAGES["0.32.0"])
    installed["opentelemetry-sdk"] = package("1.44.0", "opentelemetry-api==1.45.0")
    check = check_packages(installed)
    assert check.outcome == "warn"
    assert "opentelemetry-sdk 1.44.0 wants opentelemetry-api==1.45.0" in check.found


def test_a_vllm_without_metadata():
    assert check_packages({"protobuf": package("7.35.1")}).outcome == "skip"


def test_this_environment():
    assert check_packages(software.packages()).outcome == "ok"
