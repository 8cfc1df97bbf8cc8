"""Parts of the product that `--break PART` takes away, so that its tests are seen to fail.

A test names the parts that it must fail without: `@pytest.mark.fails_without("blocks")`. With
`--break blocks` only those tests run, and each has to fail. Most parts go inside the engine (see
hooks/broken.py); the others are settings and variables of its start, here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

PARTS = {
    "blocks": "loads fill all blocks",
    "guard": "an error in a load or a store is caught",
    "report": "vLLM hears of blocks that a load left unfilled",
    "withhold": "a step whose load failed stores nothing of what read its blocks",
    "counters": "errors and fallbacks are counted",
    "bytes": "bytes and seconds are counted as they are",
    "metrics": "all processes of an engine share their metrics",
    "parameters": "an error in a hook of the scheduler costs its request a hit",
    "labels": "LMCache's metrics name the model as it is served",
    "salt": "cache_salt and LoRA adapter are in the keys",
    "computed": "nothing is looked up for a request that computes its whole prompt",
    "finished": "what an aborted request had looked up is unpinned",
    "reset": "a reset resets what the connector finds",
    "references": "references to what was loaded are given back",
    "weights": "the model's weights are in the keys",
    "checksum": "files are compared with their checksum",
    "evict": "the disk tier keeps to its size",
    "modes": "files are for their owner alone",
    "shared": "what another engine stored is found in the shared tier",
    "away": "a server that fails is left alone for a while",
    "settings": "settings are checked",
    "preflight": "the machine is checked before the start",
    "chunk": "the chunk size is the one that was asked for",
    "offload": "there are tiers",
    "disk": "there is a disk tier",
    "roomy": "the CPU tier keeps to its size",
    "seed": "the hash seed is the same in every process",
    "other_seed": "another hash seed makes other keys",
    "loopback": "the server listens on loopback",
    "drain": "answers may end when the engine is stopped",
    "api_key": "the API key reaches the engine",
}

SETTINGS: dict[str, dict[str, object]] = {
    "chunk": {"chunk_tokens": 128},
    "offload": {"offload": False},
    "disk": {"disk_path": None, "disk_gib": None},
    "roomy": {"cpu_gib": 1.0},
    "loopback": {"host": "0.0.0.0"},
    "drain": {"drain_s": 0},
}

ENVIRONMENTS: dict[str, Callable[[], dict[str, str]]] = {
    "seed": lambda: {"PYTHONHASHSEED": str(secrets.randbelow(2**32))},
    "other_seed": lambda: {"PYTHONHASHSEED": "0"},
    "api_key": lambda: {"VLLM_API_KEY": ""},
}

if __name__ == "__main__":
    print(*PARTS)
