"""Ranks, process sets, and the libraries that carry messages."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Literal, TypeVar

import torch

from ..comm import Comm, current_comm, has_joined, horovod_torch, wire_in_use
from ..comm import init as join_wire
from ..comm import shutdown as leave_wire
from ..errors import ConfigError
from ..errors.checks import is_number

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]


class ProcessSet:
    """Some of the ranks, for collectives and DistributedOptimizer, once `init` or `add_process_set` has added it.

    Attributes:
        ranks: its members, ascending.
        unnamed: counter of the collectives that were given no name.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self.unnamed = itertools.count()
        self._comm: Comm | None = None

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"

    def included(self) -> bool:
        """Return True if this rank is in the set."""
        return rank() in self.ranks

    def rank(self) -> int | None:
        """Return this rank's place in the set; None outside."""
        return self.ranks.index(rank()) if self.included() else None

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def place_of(self, root_rank: int) -> int:
        """Return a rank's place in the set. Raises ConfigError if it is not a member."""
        if not is_number(root_rank, Integral) or root_rank not in self.ranks:
            raise ConfigError(f"root_rank {root_rank!r} is not in {self}")
        return self.ranks.index(root_rank)


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0  # by which DistributedOptimizer knows Horovod's, too

_added: list[ProcessSet] = []
_world: Comm | None = None
"""The current ranks, which change when `hvd.elastic.run` restarts Horovod."""


# -- joining ---------------------------------------------------------------------------------------------------------


def init(*, process_sets: Iterable[ProcessSet] | Literal["dynamic"] = ()) -> None:
    """Join the other ranks by `dgcopt.init()`, unless that has been done, and add `process_sets`.

    Called again, it only adds sets; "dynamic" is accepted because sets can always be added.
    """
    if not is_initialized():
        _leave_sets()
        _add_world(join_wire())
    if process_sets != "dynamic":
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks. `init` joins again; process sets must be added again, too."""
    _leave_sets()
    leave_wire()


def _leave_sets() -> None:
    while _added:
        _remove(_added[-1])


def is_initialized() -> bool:
    """Return True if `init` has been called, and neither this `shutdown` nor that of dgcopt since."""
    return global_process_set._comm is not None and has_joined()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make these ranks a group of their own and return it; every rank must call it with the same ranks.

    A set that is there already stays as it is.
    """
    _joined()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return process_set if process_set in _added else _add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set that was added; False if it was not, or is that of all ranks."""
    _joined()
    there = process_set is not global_process_set and process_set in _added
    if there:
        _remove(process_set)
    return there


def _add(process_set: ProcessSet) -> ProcessSet:
    # a comm of its own for all ranks, too: on some wires the comm of the optimizers would match by order alone
    process_set._comm = current_comm().among(process_set.ranks)
    process_set.unnamed = itertools.count()
    _added.append(process_set)
    return process_set


def _remove(process_set: ProcessSet) -> None:
    _added.remove(process_set)
    if process_set._comm is not None:
        process_set._comm.close()
    process_set._comm = None


def _add_world(comm: Comm) -> None:
    global _world
    _world = comm
    global_process_set.ranks = list(comm.ranks())
    _add(global_process_set)


def _joined() -> Comm:
    if not is_initialized():
        raise ConfigError("dgcopt.hvd has not been initialized; call hvd.init() first")
    comm = current_comm()
    if comm is not _world:
        _leave_sets()
        _add_world(comm)
    return comm


def comm_of(process_set: ProcessSet) -> Comm:
    """Return the comm of an added set. Raises ConfigError if it was not added, or this rank is not in it."""
    me = _joined().rank
    if process_set._comm is None:
        raise ConfigError(f"{process_set} has not been added: hvd.add_process_set() does, on all ranks")
    if me not in process_set.ranks:
        raise ConfigError(f"rank {me} is not in {process_set}, so it takes no part in its collectives")
    return process_set._comm


# -- ranks -----------------------------------------------------------------------------------------------------------


def rank() -> int:
    """Return this process's number, from 0."""
    return _joined().rank


def size() -> int:
    """Return the number of processes."""
    return _joined().size


def local_rank() -> int:
    """Return this process's number on its machine."""
    return _joined().local_rank


def local_size() -> int:
    """Return the number of processes on this machine."""
    return _joined().local_size


def cross_rank() -> int:
    """Return this process's number among those of the same local rank, one on each machine."""
    return _joined().cross_rank


def cross_size() -> int:
    """Return the number of processes of this local rank, one on each machine."""
    return _joined().cross_size


# -- which libraries there are ---------------------------------------------------------------------------------------

Answer = TypeVar("Answer", bool, int)


def _by_horovod(answer: Callable[[], Answer]) -> Callable[[], Answer]:
    """Return a function that gives Horovod's own answer if it is the wire, else that of `answer`."""

    @functools.wraps(answer)
    def ask() -> Answer:
        return getattr(horovod_torch(), answer.__name__)() if wire_in_use() == "horovod" else answer()

    return ask


@_by_horovod
def mpi_built() -> bool:
    """Return True if messages could travel by MPI: Horovod was built with it, or mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


@_by_horovod
def mpi_enabled() -> bool:
    """Return True if messages travel by MPI."""
    return wire_in_use() == "mpi"


def mpi_threads_supported() -> bool:
    """Return True if several threads may use MPI at once. Raises ConfigError, as Horovod, if MPI is not used."""
    comm = _joined()
    if not mpi_enabled():
        raise ConfigError(f"messages do not travel by MPI here, but over {comm.wire}")
    return horovod_torch().mpi_threads_supported() if comm.wire == "horovod" else not comm.no_threads


@_by_horovod
def gloo_built() -> bool:
    """Return True if messages could travel by Gloo: Horovod, or torch, was built with it."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


@_by_horovod
def gloo_enabled() -> bool:
    """Return True if messages travel by Gloo."""
    return wire_in_use() == "torch"


@_by_horovod
def nccl_built() -> int:
    """Return NCCL's version (21903 is 2.19.3) if Horovod, or torch, was built with it, else 0."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


@_by_horovod
def ddl_built() -> bool:
    """Return True if Horovod is the wire and was built with IBM's DDL."""
    return False


@_by_horovod
def ccl_built() -> bool:
    """Return True if Horovod is the wire and was built with Intel's oneCCL."""
    return False


@_by_horovod
def cuda_built() -> bool:
    """Return True if Horovod, or torch, was built with CUDA."""
    return torch.version.cuda is not None


@_by_horovod
def rocm_built() -> bool:
    """Return True if Horovod, or torch, was built with ROCm."""
    return torch.version.hip is not None
