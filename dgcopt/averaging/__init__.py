"""Weights that are averaged now and then, in place of gradients at every step: one file per algorithm."""

from .base import Averaging, Weights
from .diloco import DiLoCo, SparseLoCo
from .local_sgd import LocalSGD
from .rounds import Rounds

__all__ = ["Averaging", "DiLoCo", "LocalSGD", "Rounds", "SparseLoCo", "Weights"]
