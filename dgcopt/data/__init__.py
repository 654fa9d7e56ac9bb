"""Data for ranks that wait for each other: samples that cost alike at the same time."""

from .balance import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
