"""The module path by which LMCache's server is told of the shared tier."""

from lmcache_xpu.tiers.shared_l2 import SharedL2Adapter

__all__ = ["SharedL2Adapter"]
