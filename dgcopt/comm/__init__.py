"""The wires: one interface (`Comm`), carried out by torch.distributed, Horovod, MPI, one process, or a simulator."""

from .base import DEADLINE, Comm, LocalComm, lowered
from .handles import Finished, Handle
from .horovod import horovod_torch
from .launch import current_comm, has_joined, init, shutdown, wire_in_use
from .simulated import SimulatedComm, simulate, simulated_world

__all__ = [
    "DEADLINE",
    "Comm",
    "Finished",
    "Handle",
    "LocalComm",
    "SimulatedComm",
    "current_comm",
    "has_joined",
    "horovod_torch",
    "init",
    "lowered",
    "shutdown",
    "simulate",
    "simulated_world",
    "wire_in_use",
]
