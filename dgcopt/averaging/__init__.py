"""Averaging of weights every few steps, in place of gradients at every step: one file per algorithm."""

from .asynchronous import AsyncAverage
from .base import Averaging
from .decentralized import Decentralized, LowPrecisionDecentralized
from .diloco import DiLoCo, SparseLoCo
from .gossip import SGP
from .graphs import BipartiteExponential, Exponential, Graph, Ring, ShiftOne
from .local_sgd import LocalSGD
from .partial import SPARTA
from .rounds import Rounds
from .slowmo import SlowMo
from .sync import Sync
from .weights import Weights

__all__ = [
    "SGP",
    "SPARTA",
    "AsyncAverage",
    "Averaging",
    "BipartiteExponential",
    "Decentralized",
    "DiLoCo",
    "Exponential",
    "Graph",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "Ring",
    "Rounds",
    "ShiftOne",
    "SlowMo",
    "SparseLoCo",
    "Sync",
    "Weights",
]
