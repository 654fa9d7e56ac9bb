"""Compressors of gradients: one file per algorithm, each reading like its paper."""

from ..flat.gradient import SparseSum
from ..flat.memory import Memory
from .adam.onebit_adam import OneBitAdam
from .adam.qadam import QAdam
from .base import Compressor, FirstMoment, GradientExchange, Source
from .context import Context, Place
from .dense import NoCompression, Noop
from .from_ddp import from_ddp_hook
from .horovod import HorovodCompression, accept
from .lowrank.powersgd import PowerSGD
from .quantised.base import Encoded
from .quantised.bytegrad import ByteGrad
from .quantised.natural import Natural
from .quantised.onebit import OneBit
from .quantised.onebit_reduce import OneBitReduce
from .quantised.qsgd import QSGD
from .quantised.sign import EFSignSGD, SignSGD, Signum
from .quantised.terngrad import TernGrad
from .reduction import OwnerReduction, PartitionReduction
from .sparse.base import Sparse
from .sparse.chunked import ChunkedTopK
from .sparse.cltk import CLTK
from .sparse.csc import CSC
from .sparse.demo import DeMo
from .sparse.dgc import DGC
from .sparse.randomk import RandomK
from .sparse.schedule import ScheduledRatio
from .sparse.threshold import Threshold
from .sparse.topk import TopK
from .wrappers.adasum import Adasum
from .wrappers.base import Wrapper
from .wrappers.half import BF16, FP16
from .wrappers.hierarchical import Hierarchical
from .wrappers.per_parameter import PerParameter

__all__ = [
    "BF16",
    "CLTK",
    "CSC",
    "DGC",
    "FP16",
    "QSGD",
    "Adasum",
    "ByteGrad",
    "ChunkedTopK",
    "Compressor",
    "Context",
    "DeMo",
    "EFSignSGD",
    "Encoded",
    "FirstMoment",
    "GradientExchange",
    "Hierarchical",
    "HorovodCompression",
    "Memory",
    "Natural",
    "NoCompression",
    "Noop",
    "OneBit",
    "OneBitAdam",
    "OneBitReduce",
    "OwnerReduction",
    "PartitionReduction",
    "PerParameter",
    "Place",
    "PowerSGD",
    "QAdam",
    "RandomK",
    "ScheduledRatio",
    "SignSGD",
    "Signum",
    "Source",
    "Sparse",
    "SparseSum",
    "TernGrad",
    "Threshold",
    "TopK",
    "Wrapper",
    "accept",
    "from_ddp_hook",
]
