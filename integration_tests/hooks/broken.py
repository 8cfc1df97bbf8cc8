"""Takes away the part of the product that HOOKS_BREAK names; see ../breaks.py for what they do."""

from __future__ import annotations

import functools
import os
import types

PART = os.environ.get("HOOKS_BREAK", "")
WAYS = {}  # (part, module) -> what to do with the module


def breaks(part: str, module: str):
    """Register a way to break a module of lmcache_xpu."""

    def register(way):
        WAYS[part, f"lmcache_xpu.{module}"] = way
        return way

    return register


def nothing(*_, **__) -> None:
    """Instead of what would be done."""


def reraise(*_, **__) -> None:
    """Let an error through to whoever called; make one where there is none."""
    raise


@breaks("blocks", "transfer")
def _(module) -> None:
    scatter = module.TorchTransfer.scatter

    def one_left_out(self, rows, *rest):
        # Two blocks that change places would not do: keys carry their positions, and attention
        # does not see in which order they lie.
        engine = rows.engine.clone()
        engine[-1] = engine[0]
        scatter(self, rows._replace(engine=engine), *rest)

    module.TorchTransfer.scatter = one_left_out


@breaks("guard", "guards")
def _(module) -> None:
    module.Guard._lost = reraise
    module.Guard._best_tier = reraise
    module._complain = reraise


@breaks("report", "guards")
def _(module) -> None:
    collect = module.Guard._collect

    def forgotten(self):
        self._engine.gpu_connector.failed_slots.clear()
        collect(self)

    module.Guard._collect = forgotten


@breaks("withhold", "guards")
def _(module) -> None:
    module.Guard.withhold = nothing


@breaks("counters", "metrics")
def _(module) -> None:
    module.Flow.failed = nothing
    module.fallback = nothing


@breaks("bytes", "metrics")
def _(module) -> None:
    moved = module.Flow.moved

    def half(self, seconds, *, size_bytes, tokens):
        moved(self, 0.0, size_bytes=size_bytes // 2, tokens=tokens)

    module.Flow.moved = half


@breaks("salt", "isolation")
def _(module) -> None:
    module.salt_of = lambda request: ""


@breaks("computed", "isolation")
def _(module) -> None:
    admit = module.Isolation.admit

    def forgetful(self, request):
        admit(self, request)
        self._computed.clear()

    module.Isolation.admit = forgetful


@breaks("finished", "isolation")
def _(module) -> None:
    module.Isolation.finished = nothing


@breaks("reset", "vllm_connector")
def _(module) -> None:
    module.LMCacheXPUConnector.reset_cache = nothing


@breaks("references", "gpu_connector.registered_cache")
def _(module) -> None:
    memory = module.RegisteredCache.memory

    @functools.wraps(memory)
    def kept(self, memory_objs, *args, **kwargs):
        if kwargs["loading"]:
            for obj in memory_objs:
                obj.ref_count_up()
        return memory(self, memory_objs, *args, **kwargs)

    module.RegisteredCache.memory = kept


@breaks("weights", "weights")
def _(module) -> None:
    module.fingerprint = lambda *_: "same"


@breaks("checksum", "disk.chunk_file")
def _(module) -> None:
    module.zlib = types.SimpleNamespace(crc32=lambda *_: 0)


@breaks("modes", "disk.chunk_file")
def _(module) -> None:
    write_chunk = module.write_chunk

    def readable(path, *rest):
        write_chunk(path, *rest)
        path.chmod(0o644)

    module.write_chunk = readable


@breaks("evict", "disk.chunk_store")
def _(module) -> None:
    module.ChunkStore._make_room = lambda *_: True


@breaks("shared", "remote")
def _(module) -> None:
    async def none_found(self, keys):
        return 0

    module.RemoteTier._found = none_found


@breaks("away", "remote")
def _(module) -> None:
    module.RemoteTier._leave_alone = nothing


@breaks("settings", "settings")
def _(module) -> None:
    module.Settings.load = classmethod(lambda cls, values: cls.model_construct(**values))


MODULES = {module for part, module in WAYS if part == PART}


def take_away(module) -> None:
    """When the module has been imported."""
    WAYS[PART, module.__name__](module)


def take_away_now() -> None:
    """What has to go before anything is imported."""
    if PART == "metrics":
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
