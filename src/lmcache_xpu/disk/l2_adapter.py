"""The module path by which LMCache's server is told of the disk tier."""

from lmcache_xpu.tiers.disk.l2_adapter import DiskL2Adapter

__all__ = ["DiskL2Adapter"]
