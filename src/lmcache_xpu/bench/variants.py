"""The engines to compare: all are started from `Settings`, and differ in the KV connector."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from lmcache_xpu.bench.engine import SERVER_URL, Hits
from lmcache_xpu.bench.shapes import Shape, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine."""

    name: str  # its name on the command line
    title: str  # its name for readers
    # Settings that it has besides the shape's.
    settings: dict[str, Any] = field(default_factory=dict)
    # KV transfer configuration, where the connector is not ours.
    connector: dict[str, Any] | None = None
    hits: Hits = "tier"  # the place of a prompt's KV cache that was computed, and then pushed out

    def values(self, shape: Shape, model: str, device: str, *, graphs: bool) -> dict[str, Any]:
        """Return the values that `Settings.load` makes the engine's settings from."""
        values: dict[str, Any] = {
            "model": model,
            "device": device,
            "dtype": shape.model.dtype,
            "enforce_eager": not graphs,
            "log_level": "warning",
            "extra_args": ["--load-format", "dummy", "--skip-tokenizer-init"],
            **shape.settings,
            **self.settings,
        }
        if self.connector is not None:
            config = json.dumps(self.connector | {"kv_role": "kv_both"})
            values["extra_args"] += ["--kv-transfer-config", config]
            values["offload"] = False
        return values

    def variables(self, shape: Shape, device: str) -> dict[str, str]:
        """Return the variables of the process that are not the settings'."""
        if self.connector is None:
            return {"LMCACHE_XPU_DEVICES": device}
        variables = {"LMCACHE_XPU_STOCK": "1"}
        if self.name.startswith("lmcache"):
            variables |= {
                "LMCACHE_CHUNK_SIZE": "256",
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(shape.settings["cpu_gib"]),
                "LMCACHE_USE_LAYERWISE": str(self.name == "lmcache-layerwise"),
            }
        return variables


def variants(shape: Shape) -> tuple[Variant, ...]:
    """Return all variants: the first sets the limits, and the last is for `bench load` alone."""
    cpu_bytes = int(shape.settings["cpu_gib"] * shape.devices * 2**30)
    stock = {"kv_connector": "LMCacheConnectorV1"}
    room = Variant(
        name="room",
        title="no connector, room for everything",
        settings={"offload": False, "kv_cache_gib": shape.room_gib},
        hits="own cache",
    )
    return (
        Variant(name="none", title="no connector", settings={"offload": False}, hits="none"),
        Variant(name="ours", title="ours, standard"),
        Variant(name="ours-layerwise", title="ours, layerwise", settings={"layerwise": True}),
        Variant(name="ours-server", title="ours, LMCache's server", settings={"cache": "server"}),
        Variant(name="lmcache", title="LMCache, standard", connector=stock),
        Variant(name="lmcache-layerwise", title="LMCache, layerwise", connector=stock),
        Variant(
            name="lmcache-server",
            title="LMCache, server",
            connector={
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_extra_config": {"lmcache.mp.server_urls": SERVER_URL},
            },
        ),
        Variant(
            name="offloading",
            title="vLLM's OffloadingConnector",
            connector={
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes},
            },
        ),
        *([room] if shape.loaded else []),
    )


def variants_named(shape: Shape, names: Collection[str] = ()) -> list[Variant]:
    """Return the variants of these names, in their own order; all of them without names."""
    return [*chosen("variant", {each.name: each for each in variants(shape)}, names).values()]
