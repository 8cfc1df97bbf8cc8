"""What earlier versions stored is read; engines hit it or miss it, and leave it alone.

`stored_by/VERSION` has what an engine of that version stored; see the README there. LMCache's own
engine hits its whole chunks on disk. A reported hit proves nothing, so the bytes that it restores
are compared. The cache in the engine's process and layerwise mode have other names for what they
store: they miss it, and compute.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import environment, printed

from lmcache_xpu import versions
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, pack_chunk, unpack_chunk
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

STORED_BY = Path(__file__).parent / "stored_by"
PROBE = STORED_BY / "probe.py"
VERSIONS = sorted(file.parent.name for file in STORED_BY.glob("*/README.md"))
BLOCK, CHUNK, LAYERS = 32, 64, 3
BLOCK_BYTES = BLOCK * 2 * 32 * 4  # keys and values of one head of 32 elements, float32
CHUNKS = {"standard": 2, "layerwise": 1, "local": 2, "shared": 1}
FIXED = struct.Struct("<8sIIIQHH")  # magic, version, header CRC, payload CRC, payload, key, meta


def chunk_files(version: str) -> list[Path]:
    return sorted((STORED_BY / version).glob("*/kv-worker-0/*.lmxkv"))


def values(version: str) -> list[tuple[str, bytes]]:
    """Keys and values of the shared tier's server."""
    files = sorted((STORED_BY / version / "shared").glob("*.key"))
    return [(file.read_text(), file.with_suffix(".value").read_bytes()) for file in files]


def stored(version: str, case: str) -> list[bytes]:
    """Files or values of one case."""
    if case == "shared":
        return [value for _, value in values(version)]
    return [file.read_bytes() for file in chunk_files(version) if file.parts[-3] == case]


def header(raw: bytes) -> tuple[str, str, bytes]:
    """Key, meta and payload of a stored chunk, read without the package."""
    magic, version, _, _, payload_bytes, key_bytes, meta_bytes = FIXED.unpack_from(raw)
    assert (magic, version) == (b"LMXCHUNK", 1)
    texts = raw[FIXED.size :]
    key, meta = texts[:key_bytes], texts[key_bytes : key_bytes + meta_bytes]
    assert len(raw) == HEADER_BYTES + payload_bytes
    return key.decode(), meta.decode(), raw[HEADER_BYTES:]


def blocks(version: str, case: str) -> list[set[str]]:
    """Per layer, the digests of the engine's blocks in what was stored of whole chunks."""
    digests: list[set[str]] = [set() for _ in range(LAYERS)]
    for raw in stored(version, case):
        _, _, payload = header(raw)
        for number in range(len(payload) // BLOCK_BYTES):
            block = payload[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            digests[number // (CHUNK // BLOCK)].add(hashlib.sha256(block).hexdigest())
    return digests


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_directory_is_read_and_written_byte_for_byte(version: str, tmp_path: Path):
    files = chunk_files(version)
    assert len(files) == 4  # two chunks, and one of two groups of layers
    for number, file in enumerate(files):
        raw = file.read_bytes()
        key, meta, payload = header(raw)
        directory = tmp_path / f"{number} read"
        directory.mkdir()
        shutil.copy(file, directory)
        store = ChunkStore(directory, 2**30)
        assert key in store
        assert store.info(key) == (meta, len(payload))
        buffer = bytearray(len(payload))
        assert store.read(key, memoryview(buffer))
        assert bytes(buffer) == payload
        store.close()

        store = ChunkStore(tmp_path / f"{number} written", 2**30)
        assert store.put(key, meta, payload)
        assert (store.directory / file.name).read_bytes() == raw
        store.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_s_values_are_read_and_written_byte_for_byte(version: str):
    assert len(values(version)) == CHUNKS["shared"]
    for name, value in values(version):
        key, meta, payload = header(value)
        assert key == name
        unpacked_meta, view = unpack_chunk(memoryview(value), name)
        assert (unpacked_meta, bytes(view)) == (meta, payload)
        assert pack_chunk(name, meta, memoryview(payload)) == value


def ask(version: str, case: str, place: Path) -> dict[str, Any]:
    """What an engine of the present code does when it is asked for what was stored."""
    kept = "standard" if case == "local" else case
    key, _, _ = header(stored(version, kept)[0])
    vllm = versions.installed().vllm
    if f".vllm{vllm}" not in key:
        pytest.skip(f"stored by another vLLM than {vllm}, which may pack its blocks otherwise")
    shutil.copytree(STORED_BY / version, place, dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, PROBE, "hit", case],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    result = printed(done)
    for file in (STORED_BY / version / kept).rglob("*.lmxkv"):
        there = place / file.relative_to(STORED_BY / version)
        assert there.read_bytes() == file.read_bytes()
    return result


@pytest.mark.engine
@pytest.mark.parametrize("version", VERSIONS)
def test_lmcache_s_own_engine_hits_whole_chunks(version: str, tmp_path: Path):
    result = ask(version, "standard", tmp_path)
    assert result["hits"] == CHUNKS["standard"] * CHUNK
    assert result["loaded"] == CHUNKS["standard"] * CHUNK  # from the tier, not computed instead
    assert result["fallbacks"] == 0
    wanted = blocks(version, "standard")
    assert [len(layer) for layer in wanted] == [CHUNKS["standard"] * CHUNK // BLOCK] * LAYERS
    for layer, digests in zip(wanted, result["blocks"], strict=True):
        assert layer <= set(digests)
    assert result["answer"] == result["computed"]


@pytest.mark.engine
@pytest.mark.parametrize("case", ["local", "layerwise"])
@pytest.mark.parametrize("version", VERSIONS)
def test_others_miss_it_compute_and_hit_what_they_store_themselves(
    version: str, case: str, tmp_path: Path
):
    result = ask(version, case, tmp_path)
    assert (result["hits"], result["loaded"], result["fallbacks"]) == (0, 0, 0)
    if case == "local":  # the probe resets, after which LMCache's own engine is shown nothing
        assert result["hits again"] == CHUNKS[case] * CHUNK
    assert result["answer"] == result["computed"] == result["again"]
