"""What vLLM's extra configuration says of a cache in the engine's process, under `xpu.cache`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers import disk_option, shared_option

CPU, DISK, SHARED = "cpu", "disk", "shared"  # the tiers' names


class LocalCacheOptions(BaseModel):
    """The options of a cache, in this process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_tokens: int = Field(256, ge=1)  # rounded up to whole blocks of the engine
    cpu_gib: float = Field(5.0, gt=0)
    disk_path: Path | None = None  # directory of the disk tier; None for no such tier
    disk_gib: float | None = Field(None, gt=0)
    remote_url: str | None = None  # of the shared tier
    tier_dtype: Literal["auto", "fp8"] = "auto"  # of elements in the tiers

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Check what was configured; raise SettingsError that names what is not as expected."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            [first, *_] = error.errors()
            where = ".".join(map(str, first["loc"]))
            raise SettingsError(
                f"xpu.cache with {where}={first['input']!r}",
                f"one of {', '.join(cls.model_fields)}, as `lmcache-xpu serve --dry-run` prints it",
                first["msg"],
            ) from None

    def adapters(self, engine: int) -> dict[str, Any]:
        """Return LMCache's options of the tiers behind memory, by name, in the order of asking.

        Several engines may share the disk; each has a number.
        """
        tiers = {}
        if self.disk_path is not None:
            tiers[DISK] = disk_option(self.disk_path, self.disk_gib or 0, engine=engine)
        if self.remote_url is not None:
            tiers[SHARED] = shared_option(self.remote_url)
        return {
            tier: PluginL2AdapterConfig.from_dict(json.loads(text)) for tier, text in tiers.items()
        }
