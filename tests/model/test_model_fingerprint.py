"""The name of the weights: equal for equal files anywhere, different for other content."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from lmcache_xpu.model.model_fingerprint import fingerprint


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    save(directory, torch.arange(64 * 64).reshape(64, 64).float())
    return directory


def save(directory, weight):
    save_file({"a": weight, "b": torch.ones(64, 64)}, directory / "model.safetensors")


def test_copies_have_the_same_name_whatever_their_time_and_place(model, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    assert fingerprint(str(copy)) == fingerprint(str(model))


def test_trained_weights_of_the_same_shape_have_another_name(model):
    before = fingerprint(str(model))
    save(model, torch.arange(64 * 64).reshape(64, 64).float() + 0.5)
    assert fingerprint(str(model)) != before


def test_another_configuration_is_another_model(model):
    before = fingerprint(str(model))
    (model / "config.json").write_text('{"hidden_size": 64, "rope_theta": 5}')
    assert fingerprint(str(model)) != before


def test_a_file_without_a_list_of_tensors_is_sampled(tmp_path):
    names = set()
    for byte in (b"\0", b"\1"):
        (tmp_path / "pytorch_model.bin").write_bytes(byte * 100_000)
        names.add(fingerprint(str(tmp_path)))
    assert len(names) == 2


def test_a_commit_says_it_all():
    assert fingerprint("org/model", "a") == fingerprint("org/model", "a")
    assert fingerprint("org/model", "a") != fingerprint("org/model", "b")


def test_without_weights_it_says_what_to_do(caplog):
    assert fingerprint("org/model") == "unknown"
    assert "empty the disk tier when the model changes" in caplog.text


@pytest.mark.xfail(strict=True, reason="known limit: the name is made from the middle of tensors")
def test_a_change_of_one_row_has_another_name(model):
    """known-limits.md: after such an edit the disk tier has to be emptied by hand."""
    before = fingerprint(str(model))
    weight = torch.arange(64 * 64).reshape(64, 64).float()
    weight[0] += 0.5
    save(model, weight)
    assert fingerprint(str(model)) != before
