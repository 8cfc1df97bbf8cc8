"""The models, by the shape of their KV cache, and the requests that are timed."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.random_model import ModelSpec, llama_config


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn of a conversation: tokens that are cached, then tokens that are not."""

    history: int
    new: int

    def __str__(self) -> str:
        return f"{self.history} + {self.new}"


@dataclass(frozen=True, slots=True)
class Row:
    """The requests that are timed together.

    Args:
        name: their name for readers.
        tokens: cached tokens of all prompts.
        job: see `jobs.answer`.
    """

    name: str
    tokens: int
    job: dict[str, Any]


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
    settings: dict[str, Any] = field(default_factory=dict)

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

    def rows(self, names: Collection[str] = ()) -> list[Row]:
        """Return the requests to time, in this order: those of these names, or all.

        Raises:
            SettingsError: there are none of a name.
        """
        crowd = [self.crowd_turn] * self.crowd
        rows = [
            *(Row(f"{length}", length, {"whole": length}) for length in self.lengths),
            *(Row(f"{turn}", turn.history, _later([turn])) for turn in self.turns),
            Row(
                f"{self.crowd} x ({self.crowd_turn})",
                sum(turn.history for turn in crowd),
                _later(crowd),
            ),
        ]
        by_name = {row.name: row for row in rows}
        for name in names:
            if name not in by_name:
                raise SettingsError(f"row {name!r}", f"one of {', '.join(by_name)}")
        return [row for row in rows if not names or row.name in names]

    def write(self, directory: Path) -> None:
        """Write the model's configuration; weights are made up when it is loaded."""
        (directory / "config.json").write_text(json.dumps(llama_config(self.model)))


def _later(turns: Sequence[Turn]) -> dict[str, Any]:
    return {"later": [[turn.history, turn.new] for turn in turns]}


SHAPES = (
    Shape(
        model=ModelSpec(
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
        ),
        lengths=(8192, 32768, 65536),
        turns=(Turn(32768, 2048), Turn(61440, 4096)),
        crowd=4,
        crowd_turn=Turn(16384, 1024),
        settings={
            "max_model_len": 70_000,
            "memory_fraction": 0.2,  # several engines may share the device
            "kv_cache_gib": 12,
            "cpu_gib": 24,
        },
    ),
    Shape(  # for cards of 8 GiB and more, which a Llama of 8 billion parameters does not fit
        model=ModelSpec(
            name="1b",
            hidden=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            intermediate=8192,
            vocabulary=128256,
            positions=131072,
            dtype="bfloat16",
            qk_gain=1.0,
        ),
        lengths=(8192, 32768),
        turns=(Turn(16384, 1024),),
        crowd=4,
        crowd_turn=Turn(8192, 512),
        settings={
            "max_model_len": 40_000,
            "memory_fraction": 0.2,
            "kv_cache_gib": 2,
            "cpu_gib": 4,
        },
    ),
    Shape(
        model=ModelSpec(
            name="small",
            hidden=512,
            layers=8,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate=1408,
            vocabulary=8192,
            qk_gain=1.0,
        ),
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
