"""dgcopt: train data-parallel over slow links by sending a few bytes per thousand parameters.

comm = dgcopt.init()
optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC(ratio=0.001))
dgcopt.broadcast_parameters(model.state_dict())
"""

from . import checkpoint
from .broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .comm import Comm, init, shutdown, simulate, simulated_world
from .compressors import BF16, DGC, FP16, Adasum, Compressor, Context, NoCompression
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
    "DGC",
    "FP16",
    "Adasum",
    "CheckpointError",
    "Comm",
    "CommError",
    "Compressor",
    "ConfigError",
    "Context",
    "DGCError",
    "DistributedOptimizer",
    "DivergenceError",
    "LocalClip",
    "MismatchError",
    "NoCompression",
    "PayloadError",
    "SparseSum",
    "Telemetry",
    "TimeoutExceeded",
    "Warmup",
    "__version__",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "checkpoint",
    "init",
    "join",
    "shutdown",
    "simulate",
    "simulated_world",
]
