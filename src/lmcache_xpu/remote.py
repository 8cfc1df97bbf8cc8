"""The module path by which users' settings of LMCache name the shared tier."""

from lmcache_xpu.tiers.shared import RemoteTier

__all__ = ["RemoteTier"]
