"""What is sent: one file per algorithm, each reading like its paper."""

from .adasum import Adasum
from .base import Compressor, Context, GradientExchange, Source
from .dense import NoCompression, Noop
from .dgc import DGC
from .encoded import Encoded
from .half import BF16, FP16
from .hierarchical import Hierarchical
from .horovod import HorovodCompression, accept
from .sparse import Sparse
from .topk import TopK
from .wrapper import Wrapper

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "Adasum",
    "Compressor",
    "Context",
    "Encoded",
    "GradientExchange",
    "Hierarchical",
    "HorovodCompression",
    "NoCompression",
    "Noop",
    "Source",
    "Sparse",
    "TopK",
    "Wrapper",
    "accept",
]
