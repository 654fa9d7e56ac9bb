"""Data loading for synchronous training: load-balanced sampling and cached samples."""

from .balance import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from .cache import CachedDataset, CacheLoader
from .stores import DiskStore, MemoryStore, RedisStore, Store

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "DiskStore",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "MemoryStore",
    "RedisStore",
    "Store",
]
