"""dgcopt: train data-parallel over slow links by sending a few bytes per thousand parameters.

comm = dgcopt.init()
optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(...), model.named_parameters(), dgcopt.DGC(ratio=0.001))
dgcopt.broadcast_parameters(model.state_dict())
"""

from . import checkpoint
from .broadcast import broadcast_optimizer_state, broadcast_parameters
from .comm import Comm, init, shutdown, simulate, simulated_world
from .compressors import BF16, DGC, FP16, Compressor, Context, NoCompression
from .engine import Telemetry
from .errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DGCError,
    MismatchError,
    PayloadError,
    TimeoutExceeded,
)
from .memory import LocalClip
from .optimizer import DistributedOptimizer
from .schedule import Warmup

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "CheckpointError",
    "Comm",
    "CommError",
    "Compressor",
    "ConfigError",
    "Context",
    "DGCError",
    "DistributedOptimizer",
    "LocalClip",
    "MismatchError",
    "NoCompression",
    "PayloadError",
    "Telemetry",
    "TimeoutExceeded",
    "Warmup",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "init",
    "shutdown",
    "simulate",
    "simulated_world",
]
