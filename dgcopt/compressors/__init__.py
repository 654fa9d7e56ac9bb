"""What is sent: one file per algorithm, each reading like its paper."""

from .adasum import Adasum
from .base import Compressor, GradientExchange, Source
from .bytegrad import ByteGrad
from .chunked import ChunkedTopK
from .cltk import CLTK
from .context import Context
from .csc import CSC
from .demo import DeMo
from .dense import NoCompression, Noop
from .dgc import DGC
from .encoded import Encoded
from .from_ddp import from_ddp_hook
from .half import BF16, FP16
from .hierarchical import Hierarchical
from .horovod import HorovodCompression, accept
from .natural import Natural
from .onebit import OneBit
from .onebit_adam import OneBitAdam
from .per_parameter import PerParameter
from .powersgd import PowerSGD
from .qadam import QAdam
from .qsgd import QSGD
from .randomk import RandomK
from .reduction import OwnerReduction, PartitionReduction
from .schedule import ScheduledRatio
from .sign import EFSignSGD, SignSGD, Signum
from .sparse import Sparse
from .terngrad import TernGrad
from .threshold import Threshold
from .topk import TopK
from .wrapper import Wrapper

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
    "GradientExchange",
    "Hierarchical",
    "HorovodCompression",
    "Natural",
    "NoCompression",
    "Noop",
    "OneBit",
    "OneBitAdam",
    "OwnerReduction",
    "PartitionReduction",
    "PerParameter",
    "PowerSGD",
    "QAdam",
    "RandomK",
    "ScheduledRatio",
    "SignSGD",
    "Signum",
    "Source",
    "Sparse",
    "TernGrad",
    "Threshold",
    "TopK",
    "Wrapper",
    "accept",
    "from_ddp_hook",
]
