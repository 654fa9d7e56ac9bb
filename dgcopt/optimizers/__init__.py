"""Optimizers on one rank: `MuonAdamW`, and `fuse_optimizer`, which joins small parameters into few kernels."""

from .fuse import fuse_optimizer
from .muon import MuonAdamW

__all__ = ["MuonAdamW", "fuse_optimizer"]
