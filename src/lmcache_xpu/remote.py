"""The module path and class name by which users' settings of LMCache name the shared tier."""

from lmcache_xpu.tiers.shared import SharedTier as RemoteTier

__all__ = ["RemoteTier"]
