"""What is sent: one file per algorithm, each reading like its paper."""

from .base import Compressor, Context
from .dense import BF16, FP16, NoCompression
from .dgc import DGC

__all__ = ["BF16", "DGC", "FP16", "Compressor", "Context", "NoCompression"]
