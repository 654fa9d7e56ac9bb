"""What is sent: one file per algorithm, each reading like its paper."""

from .adasum import Adasum
from .base import Compressor, Context, GradientExchange
from .dense import BF16, FP16, NoCompression
from .dgc import DGC
from .horovod import HorovodCompression, accept

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "Adasum",
    "Compressor",
    "Context",
    "GradientExchange",
    "HorovodCompression",
    "NoCompression",
    "accept",
]
