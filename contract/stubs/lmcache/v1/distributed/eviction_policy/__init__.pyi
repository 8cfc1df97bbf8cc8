from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy as LRUEvictionPolicy
