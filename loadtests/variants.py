"""What is compared, and with how much load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_xpu.harness.random_model import DEMO
from lmcache_xpu.launch.settings import Settings

__all__ = ["PROFILES", "VARIANTS", "Profile", "Variant", "settings_of"]

ENGINE_CPU_GIB = 1.0
ENGINE_DISK_GIB = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the engine.

    Args:
        name: a word.
        about: a line for people.
        settings: the settings that make it.
        restarted: it is measured by a fresh engine, after another one has had the same traffic.
        control: it is measured without reuse, too.
    """

    name: str
    about: str
    settings: dict[str, object] = field(default_factory=dict)
    restarted: bool = False
    control: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(
            name="none", about="vLLM without offload", settings={"offload": False}, control=True
        ),
        Variant(name="cpu", about="CPU tier", settings={"disk_path": None}, control=True),
        Variant(name="disk", about="disk tier after a restart", restarted=True),
        Variant(
            name="layerwise",
            about="CPU tier, layerwise",
            settings={"disk_path": None, "layerwise": True},
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How much load, in which order of variants, and for engines that are started here, how small.

    Args:
        order: of the variants; one that comes twice is measured twice.
        users: U of multi-round QA.
        rounds: R.
        qps: Q.
        shared_words: S.
        history_words: H.
        answer_tokens: A.
        duration_s: of a run.
        restart_duration_s: of a run before a restart, and of that after it.
        control_s: of a run without reuse; 0 leaves it out.
        control_words: of a prompt without reuse.
        engine_tokens: that the engine's own KV cache holds.
        max_model_len: longest prompt and answer.
    """

    order: tuple[str, ...]
    users: int
    rounds: int
    qps: float
    shared_words: int
    history_words: int
    answer_tokens: int
    duration_s: float
    restart_duration_s: float
    control_s: float
    control_words: int
    engine_tokens: int
    max_model_len: int


# R-1 and U have no common factor: or users' sends fall together, by the workload's definition, and
# the server is either idle or crowded. The working set is more than 4 times the engine's cache.
PROFILES = {
    # In CI: without and with, once each.
    "short": Profile(
        order=("none", "cpu"),
        users=11,
        rounds=8,
        qps=0.8,
        shared_words=100,
        history_words=1500,
        answer_tokens=8,
        duration_s=56,
        restart_duration_s=20,
        control_s=0,
        control_words=1600,
        engine_tokens=4096,
        max_model_len=2560,
    ),
    # There and back, so that a drift of the machine meets both sides alike.
    "long": Profile(
        order=("none", "cpu", "layerwise", "disk", "disk", "layerwise", "cpu", "none"),
        users=10,
        rounds=8,
        qps=0.5,
        shared_words=200,
        history_words=2200,
        answer_tokens=16,
        duration_s=55,
        restart_duration_s=45,
        control_s=20,
        control_words=2400,
        engine_tokens=5120,
        max_model_len=3072,
    ),
}


def settings_of(
    variant: Variant, profile: Profile, *, model: Path, disk: Path, port: int
) -> Settings:
    """Settings of an engine on CPU. Its own prefix cache is on in every variant.

    Raises:
        SettingsError: a variable LMCACHE_XPU_* contradicts.
    """
    tiers: dict[str, Any] = {"disk_path": disk, "disk_gib": ENGINE_DISK_GIB} | variant.settings
    if tiers["disk_path"] is None:
        tiers["disk_gib"] = None
    return Settings.load(
        {
            "model": str(model),
            "served_model_name": "demo",
            "port": port,
            "device": "cpu",
            "dtype": DEMO.dtype,
            "max_model_len": profile.max_model_len,
            "kv_cache_gib": profile.engine_tokens * DEMO.kv_bytes_per_token / 2**30,
            "prefix_caching": True,
            "enforce_eager": True,
            "cpu_gib": ENGINE_CPU_GIB,
            **tiers,
        }
    )
