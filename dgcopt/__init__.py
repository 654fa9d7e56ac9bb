"""dgcopt: train data-parallel over slow links by sending a few bytes per thousand parameters.

comm = dgcopt.init()
optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC(ratio=0.001))
dgcopt.broadcast_parameters(model.state_dict())
"""

import importlib
from typing import Any

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
    OneBitReduce,
    PerParameter,
    PowerSGD,
    QAdam,
    RandomK,
    SignSGD,
    Signum,
    SparseSum,
    TernGrad,
    Threshold,
    TopK,
    from_ddp_hook,
)
from .compressors.sparse.memory import LocalClip
from .compressors.sparse.schedule import Warmup
from .errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DGCError,
    DivergenceError,
    InterruptedStep,
    MismatchError,
    OutOfData,
    PayloadError,
    QuorumLost,
    TimeoutExceeded,
    VotedOut,
)
from .exchange.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .exchange.buffers import sync_buffers
from .exchange.divergence import check_replicas
from .exchange.telemetry import Telemetry
from .exchange.trace import trace
from .exchange.uneven import join
from .gradients.hook.ddp import ddp_hook
from .gradients.optimizer import DistributedOptimizer
from .optimizers import MuonAdamW, fuse_optimizer
from .tuning.auto import Auto
from .version import __version__


def __getattr__(name: str) -> Any:
    """Import modules on first use."""
    if name in ("data", "elastic", "hvd", "integrations", "sharded", "survive", "testing"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "Auto",
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
    "InterruptedStep",
    "LocalClip",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "MismatchError",
    "MuonAdamW",
    "Natural",
    "NoCompression",
    "Noop",
    "OneBit",
    "OneBitAdam",
    "OneBitReduce",
    "OutOfData",
    "PayloadError",
    "PerParameter",
    "PowerSGD",
    "QAdam",
    "QuorumLost",
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
    "VotedOut",
    "Warmup",
    "__version__",
    "averaging",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "checkpoint",
    "ddp_hook",
    "from_ddp_hook",
    "fuse_optimizer",
    "init",
    "join",
    "shutdown",
    "simulate",
    "simulated_world",
    "sync_buffers",
    "trace",
]
