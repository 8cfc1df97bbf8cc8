"""The models, by the shape of their KV cache, and the requests that are timed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lmcache_xpu.bench.jobs import Conversations, Decoding, Prompts
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.harness.random_model import DEMO, ModelSpec
from lmcache_xpu.launch.serve import built_for

T = TypeVar("T")
Request = Prompts | Decoding | Conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with random weights, and the requests to it."""

    model: ModelSpec  # the Llama; its name is the shape's
    settings: dict[str, Any]  # the engine's settings besides the model
    # Requests of `bench engine`; the first is also compared byte by byte.
    prompts: tuple[Prompts, ...]
    # Settings of `bench load`: the engine's own cache is too small for all conversations.
    load_settings: dict[str, float]
    room_gib: float  # KV cache of an engine with room for all of them; for `bench load` alone
    # Requests that decode beside hits; and beside prompts that are new (`storing`).
    decoding: Decoding
    conversations: Conversations  # of many users
    loaded: bool = False  # whether it is the shape of `bench load`

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
        return replace(self, settings=settings, room_gib=self.room_gib / count)

    def under_load(self) -> Shape:
        """Return the shape with the settings of `bench load`."""
        return replace(self, settings=self.settings | self.load_settings, loaded=True)

    @property
    def requests(self) -> dict[str, Request]:
        """The prompts of `bench engine`, or the loads of `bench load`, by name; each a table."""
        if not self.loaded:
            return {str(prompts): prompts for prompts in self.prompts}
        return {
            "decoding": self.decoding,
            "copying": replace(self.decoding, hit=replace(self.decoding.hit, new=1)),
            "storing": replace(self.decoding, new=True),
            "conversations": self.conversations,
        }


def chosen(kind: str, choices: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """Return the choices of these names, in their own order; all of them without names."""
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
        settings={**_GPU, "max_model_len": 70_000, "kv_cache_gib": 12, "cpu_gib": 24},
        prompts=(
            *(Prompts(8192), Prompts(32768), Prompts(65536)),
            *(Prompts(32768, 2048), Prompts(61440, 4096), Prompts(16384, 1024, count=4)),
        ),
        load_settings={"kv_cache_gib": 15, "cpu_gib": 56},
        room_gib=50,
        decoding=Decoding(
            requests=16, prompt=512, tokens=1400, hits=8, hit=Prompts(32768, 256), every_s=0.8
        ),
        conversations=Conversations(
            users=24, rounds=4, history=12_000, new=1000, answer=64, apart_s=0.15
        ),
    ),
    Shape(  # for devices of 8 GiB and more, which a Llama of 8 billion parameters does not fit
        model=replace(_LLAMA_8B, name="1b", hidden=2048, layers=16, head_dim=64, intermediate=8192),
        settings={**_GPU, "max_model_len": 40_000, "kv_cache_gib": 2, "cpu_gib": 4},
        prompts=(
            *(Prompts(8192), Prompts(32768)),
            *(Prompts(16384, 1024), Prompts(8192, 512, count=4)),
        ),
        load_settings={"kv_cache_gib": 1.5, "cpu_gib": 6},
        room_gib=4,
        decoding=Decoding(
            requests=8, prompt=512, tokens=700, hits=6, hit=Prompts(16384, 256), every_s=0.8
        ),
        conversations=Conversations(
            users=12, rounds=4, history=6000, new=500, answer=64, apart_s=0.15
        ),
    ),
    Shape(
        model=replace(DEMO, name="small", kv_heads=4, vocabulary=8192, qk_gain=1.0),
        settings={"max_model_len": 4608, "kv_cache_gib": 1, "cpu_gib": 2, "block_tokens": 128},
        prompts=(
            *(Prompts(1024), Prompts(2048), Prompts(4096)),
            *(Prompts(2048, 256), Prompts(3840, 256), Prompts(1024, 128, count=4)),
        ),
        load_settings={"kv_cache_gib": 0.09, "cpu_gib": 1},
        room_gib=1,
        decoding=Decoding(
            requests=4, prompt=128, tokens=160, hits=4, hit=Prompts(2048, 128), every_s=0.5
        ),
        conversations=Conversations(
            users=6, rounds=3, history=1536, new=128, answer=16, apart_s=0.1
        ),
    ),
)


def default_name() -> str:
    """Return the name of a shape that any device holds that vLLM here is built for."""
    return "small" if built_for() == "cpu" else "1b"


def shape_named(name: str) -> Shape:
    """Return the shape of this name; raises SettingsError if there is none."""
    [shape] = chosen("shape", {shape.name: shape for shape in SHAPES}, [name]).values()
    return shape
