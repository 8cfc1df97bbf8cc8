"""Models by the shape of their KV cache, with random weights, and the requests that are timed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_xpu.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn: tokens that are cached, and tokens after them that are not."""

    history: int
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama without weights of its own, and what is asked of it.

    Args:
        name: as on the command line.
        layers, heads, kv_heads, head_size, intermediate: of the model.
        dtype: of weights and KV cache.
        lengths: of whole prompts, tokens; the first is also compared byte by byte.
        turns: later turns.
        crowd: this many later turns at once.
        crowd_turn: what each of them is.
        settings: of the engine, beside the model.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    dtype: str
    lengths: tuple[int, ...]
    turns: tuple[Turn, ...]
    crowd: int
    crowd_turn: Turn
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Of the KV cache of one token."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_size * size

    def write(self, directory: Path) -> None:
        """The model's configuration; weights are made up when it is loaded."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.heads * self.head_size,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": 128256 if self.layers > 16 else 8192,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        (directory / "config.json").write_text(json.dumps(config))


SHAPES = (
    Shape(
        name="8b",
        layers=32,
        heads=32,
        kv_heads=8,
        head_size=128,
        intermediate=14336,
        dtype="bfloat16",
        lengths=(8192, 32768, 65536),
        turns=(Turn(32768, 2048), Turn(61440, 4096)),
        crowd=4,
        crowd_turn=Turn(16384, 1024),
        settings={"max_model_len": 70_000, "memory_fraction": 0.35, "cpu_gib": 24},
    ),
    Shape(
        name="small",
        layers=8,
        heads=8,
        kv_heads=4,
        head_size=64,
        intermediate=1408,
        dtype="float32",
        lengths=(1024, 2048, 4096),
        turns=(Turn(2048, 256), Turn(3840, 256)),
        crowd=4,
        crowd_turn=Turn(1024, 128),
        settings={"max_model_len": 4608, "kv_cache_gib": 1, "cpu_gib": 2, "block_tokens": 128},
    ),
)


def shape_named(name: str) -> Shape:
    """One of `SHAPES`.

    Raises:
        SettingsError: there is none of this name.
    """
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise SettingsError(f"shape={name}", " or ".join(shape.name for shape in SHAPES))
