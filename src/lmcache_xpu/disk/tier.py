"""The module path by which users' settings of LMCache name the disk tier."""

from lmcache_xpu.tiers.stock_disk import DiskTier

__all__ = ["DiskTier"]
