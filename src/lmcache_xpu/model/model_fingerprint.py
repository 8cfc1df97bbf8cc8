"""A short name for a model's or an adapter's weights, for keys: the model's name says too little.

A model may change under one name, and KV caches outlive engines on disk and in a shared tier. The
name is made from content, not from times or places, so that hosts with the same files share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_SAMPLE_BYTES = 256
_SAMPLES = 64  # of a file whose tensors are not listed
_DIGITS = 12


def fingerprint(model: str, commit: str | None = None) -> str:
    """Twelve digits of a hash; equal for equal files, different after any usual training.

    Reads the configuration, the list of tensors, and some bytes from the middle of each: 700
    reads for a model of 70 billion parameters, whatever its size. A change that keeps all of these
    (single rows of an embedding, for example) is not seen.

    A model is a directory, a file, or a name on a hub; the commit there says it all.
    """
    if commit:
        return hashlib.sha256(commit.encode()).hexdigest()[:_DIGITS]
    path = Path(model)
    files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    digest = hashlib.sha256()
    has_weights = False
    for file in files:
        if file.name in _CONFIGS:
            digest.update(file.read_bytes())
        elif file.suffix in _SUFFIXES and not file.is_fifo():
            has_weights = True
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            for sample in _samples(file):
                digest.update(sample)
    if not has_weights:
        logger.warning(
            "lmcache-xpu: no weights found at %s, so cached KV is told apart by the model's name "
            "alone: empty the disk tier when the model changes (docs: troubleshooting#no-weights)",
            model,
        )
        return "unknown"
    return digest.hexdigest()[:_DIGITS]


def _samples(file: Path) -> Iterator[bytes]:
    """Yield a list of tensors, and bytes from the middle of each, in the order of the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", opened.read(8))
            yield (header := opened.read(length))
            tensors: dict[str, Any] = json.loads(header)
            tensors.pop("__metadata__", None)
            spans = [entry["data_offsets"] for entry in tensors.values()]
            middles = sorted(8 + length + (begin + end) // 2 for begin, end in spans)
        else:
            middles = [size * part // _SAMPLES for part in range(_SAMPLES)]
        for middle in middles:
            opened.seek(middle)
            yield opened.read(_SAMPLE_BYTES)
