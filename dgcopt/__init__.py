"""dgcopt: train data-parallel over slow links by sending a few bytes per thousand parameters.

comm = dgcopt.init()
optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC(ratio=0.001))
dgcopt.broadcast_parameters(model.state_dict())
"""

from . import averaging, checkpoint
from .averaging import (
    SGP,
    SPARTA,
    AsyncAverage,
    Averaging,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    SlowMo,
    SparseLoCo,
)
from .broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .comm import Comm, init, shutdown, simulate, simulated_world
from .compressors import (
    BF16,
    CLTK,
    CSC,
    DGC,
    FP16,
    QSGD,
    Adasum,
    ByteGrad,
    ChunkedTopK,
    Compressor,
    Context,
    DeMo,
    EFSignSGD,
    Hierarchical,
    Natural,
    NoCompression,
    Noop,
    OneBit,
    OneBitAdam,
    PowerSGD,
    QAdam,
    RandomK,
    SignSGD,
    Signum,
    TernGrad,
    Threshold,
    TopK,
)
from .ddp import ddp_hook
from .divergence import check_replicas
from .errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DGCError,
    DivergenceError,
    MismatchError,
    PayloadError,
    TimeoutExceeded,
)
from .memory import LocalClip
from .optimizer import DistributedOptimizer
from .schedule import Warmup
from .segments import SparseSum
from .telemetry import Telemetry
from .uneven import join
from .version import __version__

__all__ = [
    "BF16",
    "CLTK",
    "CSC",
    "DGC",
    "FP16",
    "QSGD",
    "SGP",
    "SPARTA",
    "Adasum",
    "AsyncAverage",
    "Averaging",
    "ByteGrad",
    "CheckpointError",
    "ChunkedTopK",
    "Comm",
    "CommError",
    "Compressor",
    "ConfigError",
    "Context",
    "DGCError",
    "DeMo",
    "Decentralized",
    "DiLoCo",
    "DistributedOptimizer",
    "DivergenceError",
    "EFSignSGD",
    "Hierarchical",
    "LocalClip",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "MismatchError",
    "Natural",
    "NoCompression",
    "Noop",
    "OneBit",
    "OneBitAdam",
    "PayloadError",
    "PowerSGD",
    "QAdam",
    "RandomK",
    "SignSGD",
    "Signum",
    "SlowMo",
    "SparseLoCo",
    "SparseSum",
    "Telemetry",
    "TernGrad",
    "Threshold",
    "TimeoutExceeded",
    "TopK",
    "Warmup",
    "__version__",
    "averaging",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "checkpoint",
    "ddp_hook",
    "init",
    "join",
    "shutdown",
    "simulate",
    "simulated_world",
]
