"""The loads of `bench load`: what hits and stores cost others, and what many at once gain."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lmcache_xpu.bench.jobs import Job
from lmcache_xpu.bench.load_jobs import Conversations, Decoding, Sharing
from lmcache_xpu.bench.shapes import Shape, Turn, chosen, shape_named
from lmcache_xpu.bench.variants import Variant

__all__ = ["Load", "load_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All loads, and the engine that gets them: its own cache is too small for the conversations.

    Args:
        shape: the model, and the engine's settings.
        room_gib: KV cache of an engine with room for everything.
        decoding: beside hits; and beside prompts that are new (`storing`).
        conversations: of many users.
        sharing: of a history.
    """

    shape: Shape
    room_gib: float
    decoding: Decoding
    conversations: Conversations
    sharing: Sharing

    def on_devices(self, count: int) -> Load:
        """Return the load for `count` devices that share the layers; see `Shape.on_devices`."""
        return replace(self, shape=self.shape.on_devices(count), room_gib=self.room_gib / count)

    @property
    def seats(self) -> int:
        """Number of conversations that the engine's own cache holds after their first answer."""
        talk = self.conversations
        size = (talk.history + talk.new + talk.answer) * self.shape.model.kv_bytes_per_token
        per_device = self.shape.settings["kv_cache_gib"] * 2**30
        return int(per_device * self.shape.devices / size)

    def jobs(self, names: Collection[str] = ()) -> dict[str, Job]:
        """Return the jobs of these loads, or of all, by name.

        Raises:
            SettingsError: there is no load of a name.
        """
        copying = replace(self.decoding, hit=replace(self.decoding.hit, new=1))
        jobs: dict[str, Job] = {
            "decoding": self.decoding.measure,
            "copying": copying.measure,
            "storing": replace(self.decoding, new=True).measure,
            "conversations": self.conversations.measure,
            "sharing": self.sharing.measure,
        }
        return chosen("load", jobs, names)

    def more_variants(self) -> list[Variant]:
        """Return engines beside the usual ones: modes to load, and two that never need a tier.

        `room` holds everything in its own cache. `seats` does, too, and takes no more requests at
        once than the others have room for: no tier can beat it, as it loads nothing.
        """
        room = {"offload": False, "kv_cache_gib": self.room_gib}
        return [
            Variant(name="ours-step", title="ours, loads in steps", settings={"loads": "step"}),
            Variant(name="ours-async", title="ours, loads async", settings={"loads": "async"}),
            Variant(
                name="room",
                title="no connector, room for everything",
                settings=room,
                hits="own cache",
            ),
            Variant(
                name="seats",
                title=f"the same, {self.seats} at once",
                settings={**room, "max_num_seqs": self.seats},
                hits="own cache",
            ),
        ]


def load_named(name: str) -> Load:
    """Return the load for a shape.

    Raises:
        SettingsError: there is no shape of this name.
    """
    return _LOADS[shape_named(name).name]


def _shape(name: str, **settings: float) -> Shape:
    shape = shape_named(name)
    return replace(shape, settings={**shape.settings, **settings})


_LOADS = {
    "8b": Load(
        shape=_shape("8b", kv_cache_gib=15, cpu_gib=56),
        room_gib=50,
        decoding=Decoding(
            requests=16, prompt=512, tokens=1400, hits=8, hit=Turn(32768, 256), every_s=0.8
        ),
        conversations=Conversations(
            users=24, rounds=4, history=12_000, new=1000, answer=64, apart_s=0.15
        ),
        sharing=Sharing(requests=50, history=10_000, new=200, answer=32),
    ),
    "1b": Load(
        shape=_shape("1b", kv_cache_gib=1.5, cpu_gib=6),
        room_gib=4,
        decoding=Decoding(
            requests=8, prompt=512, tokens=700, hits=6, hit=Turn(16384, 256), every_s=0.8
        ),
        conversations=Conversations(
            users=12, rounds=4, history=6000, new=500, answer=64, apart_s=0.15
        ),
        sharing=Sharing(requests=24, history=8000, new=100, answer=32),
    ),
    "small": Load(
        shape=_shape("small", kv_cache_gib=0.09, cpu_gib=1),
        room_gib=1,
        decoding=Decoding(
            requests=4, prompt=128, tokens=160, hits=4, hit=Turn(2048, 128), every_s=0.5
        ),
        conversations=Conversations(
            users=6, rounds=3, history=1536, new=128, answer=16, apart_s=0.1
        ),
        sharing=Sharing(requests=8, history=1536, new=64, answer=8),
    ),
}
