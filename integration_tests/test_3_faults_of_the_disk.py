"""Files that are damaged, gone or refused cost a recomputation."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from engine import CHUNK, Engine
from hits import CPU_CHUNKS, fill, hit
from leftovers import CLEAN, fallbacks, leaks
from prompts import tokens, whole

from lmcache_xpu.tiers.disk import chunk_file

pytestmark = pytest.mark.promise("4 faults")

LENGTH = 4 * CHUNK + 77
VERSION_AT = 8  # in a file's header, and the header's checksum behind it


def chunk_files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.lmxkv"), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.fails_without("counters")
def test_a_full_disk_stores_less(engine: Engine, disk: Path):
    """A write that finds no space. Seen to fail with errors that are not counted."""
    prompt = tokens("full disk", LENGTH)
    expected = engine.recompute(prompt).token_ids
    before = engine.metrics().sum("lmcache_xpu_errors_total", tier="disk", reason="full")
    engine.settle()
    engine.plant("disk write")
    assert engine.ask(prompt).token_ids == expected
    engine.settle()
    assert not engine.planted()
    after = engine.metrics().sum("lmcache_xpu_errors_total", tier="disk", reason="full")
    assert after == before + 1
    assert "could not be stored and was dropped" in engine.runner.log()
    assert not list(disk.rglob("*.tmp"))
    fill(engine, "after the full disk", CPU_CHUNKS)
    engine.forget()
    assert engine.ask(prompt).token_ids == expected
    assert leaks(engine) == CLEAN


def truncated(file: Path, _: list[Path]) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path, _: list[Path]) -> None:
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def swapped(file: Path, others: list[Path]) -> None:
    shutil.copyfile(others[0], file)


def another_version(file: Path, _: list[Path]) -> None:
    """An intact header that says it is of a later version of this package."""
    with file.open("r+b") as opened:
        raw = bytearray(opened.read(chunk_file.HEADER_BYTES))
        struct.pack_into("<II", raw, VERSION_AT, 2, 0)  # and the checksum without itself
        struct.pack_into("<I", raw, VERSION_AT + 4, zlib.crc32(raw))
        opened.seek(0)
        opened.write(raw)


def unreadable(file: Path, _: list[Path]) -> None:
    file.unlink()
    file.mkdir()  # reading it fails for root as well


def deleted(file: Path, _: list[Path]) -> None:
    file.unlink()


def directory_deleted(file: Path, _: list[Path]) -> None:
    shutil.rmtree(file.parent)


DAMAGES = [
    truncated,
    pytest.param(flipped, marks=pytest.mark.fails_without("checksum")),
    swapped,
    another_version,
    unreadable,
    deleted,
    directory_deleted,
]


@pytest.mark.fails_without("counters", mode="layerwise")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(
    engine: Engine, mode: str, disk: Path, damage: Callable[[Path, list[Path]], None]
):
    """In the middle of a prompt that goes on.

    The standard mode reads files before it promises anything: the hit ends before that chunk.

    Seen to fail with errors that are not counted; `flipped` also without the checksum, with wrong
    tokens.
    """
    assert engine.runner, "needs the disk tier's files"
    prompt = tokens(("damage", damage.__name__), LENGTH)
    longer = prompt[: 4 * CHUNK] + tokens((damage.__name__, "more"), 2 * CHUNK + 5)
    expected = engine.recompute(longer).token_ids
    engine.settle()
    others = chunk_files(disk)
    engine.ask(prompt)
    engine.settle()
    own = [file for file in chunk_files(disk) if file not in others]
    assert engine.inside("clear") > 0  # the disk tier is the only one left
    before, counts = fallbacks(engine), engine.counts()
    damage(own[len(own) // 2], [file for file in chunk_files(disk) if file not in own])
    engine.forget()
    assert engine.ask(longer).token_ids == expected
    if mode == "standard":
        assert (engine.counts() - counts).external_hits < 4 * CHUNK
    else:
        assert fallbacks(engine) > before
    engine.settle()
    engine.forget()
    assert engine.ask(longer).token_ids == expected
    assert hit(engine, longer)[0] == whole(len(longer))
    assert leaks(engine) == CLEAN
