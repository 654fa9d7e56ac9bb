"""Data for ranks that wait for each other: samples that cost alike at the same time, and that are made once."""

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
