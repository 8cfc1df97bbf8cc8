"""The models, by the shape of their KV cache, and the requests that are timed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.random_model import DEMO, ModelSpec, llama_config

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn of a conversation: tokens that are cached, then tokens that are not."""

    history: int
    new: int

    def __str__(self) -> str:
        return f"{self.history} + {self.new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with random weights, and the requests to it.

    Args:
        model: the Llama; its name is the shape's.
        lengths: tokens of whole prompts; the first is also compared byte by byte.
        turns: later turns.
        crowd: number of later turns at once.
        crowd_turn: each of these.
        settings: the engine's settings beside the model.
    """

    model: ModelSpec
    lengths: tuple[int, ...]
    turns: tuple[Turn, ...]
    crowd: int
    crowd_turn: Turn
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The shape's name on the command line."""
        return self.model.name

    @property
    def devices(self) -> int:
        """Number of devices that share the layers."""
        return int(self.settings.get("tensor_parallel", 1))

    def on_devices(self, count: int) -> Shape:
        """Return the shape on `count` devices that share its layers, KV cache and tier."""
        settings = self.settings | {"tensor_parallel": count}
        for name in settings.keys() & {"kv_cache_gib", "cpu_gib"}:
            settings[name] /= count
        return replace(self, settings=settings)

    @property
    def rows(self) -> dict[str, int | list[Turn]]:
        """The requests by name, each a whole prompt of some length, or later turns at once."""
        return {
            **{f"{length}": length for length in self.lengths},
            **{f"{turn}": [turn] for turn in self.turns},
            f"{self.crowd} x ({self.crowd_turn})": [self.crowd_turn] * self.crowd,
        }

    def cached_tokens(self, row: str) -> int:
        """Return the number of cached tokens of all prompts of a row."""
        prompts = self.rows[row]
        return prompts if isinstance(prompts, int) else sum(turn.history for turn in prompts)

    def write(self, directory: Path) -> None:
        """Write the model's configuration; weights are made up when it is loaded."""
        (directory / "config.json").write_text(json.dumps(llama_config(self.model)))


def chosen(kind: str, choices: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """Return the choices of these names, in their own order; all of them without names.

    Raises:
        SettingsError: there is none of a name.
    """
    for name in names:
        if name not in choices:
            raise SettingsError(f"{kind} {name!r}", f"one of {', '.join(choices)}")
    return {name: choice for name, choice in choices.items() if not names or name in names}


_LLAMA_8B = ModelSpec(
    name="8b",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
    positions=131072,
    dtype="bfloat16",
    qk_gain=1.0,
)
# Several engines may share a device.
_GPU = {"memory_fraction": 0.2}

SHAPES = (
    Shape(
        model=_LLAMA_8B,
        lengths=(8192, 32768, 65536),
        turns=(Turn(32768, 2048), Turn(61440, 4096)),
        crowd=4,
        crowd_turn=Turn(16384, 1024),
        settings={**_GPU, "max_model_len": 70_000, "kv_cache_gib": 12, "cpu_gib": 24},
    ),
    Shape(  # for devices of 8 GiB and more, which a Llama of 8 billion parameters does not fit
        model=replace(_LLAMA_8B, name="1b", hidden=2048, layers=16, head_dim=64, intermediate=8192),
        lengths=(8192, 32768),
        turns=(Turn(16384, 1024),),
        crowd=4,
        crowd_turn=Turn(8192, 512),
        settings={**_GPU, "max_model_len": 40_000, "kv_cache_gib": 2, "cpu_gib": 4},
    ),
    Shape(
        model=replace(DEMO, name="small", kv_heads=4, vocabulary=8192, qk_gain=1.0),
        lengths=(1024, 2048, 4096),
        turns=(Turn(2048, 256), Turn(3840, 256)),
        crowd=4,
        crowd_turn=Turn(1024, 128),
        settings={"max_model_len": 4608, "kv_cache_gib": 1, "cpu_gib": 2, "block_tokens": 128},
    ),
)
# What the largest shape takes of a device: weights of 15 GiB, KV cache of 12 GiB, and activations.
LARGE_GIB = 32


def default_name(device: str, memory_bytes: int) -> str:
    """Return the name of the largest shape that a device holds."""
    if device == "cpu":
        return "small"
    return "8b" if memory_bytes >= LARGE_GIB * 2**30 else "1b"


def shape_named(name: str) -> Shape:
    """Return the shape of this name.

    Raises:
        SettingsError: there is none of this name.
    """
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise SettingsError(f"shape={name}", " or ".join(shape.name for shape in SHAPES))
