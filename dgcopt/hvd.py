"""Horovod's names over any wire: `import dgcopt.hvd as hvd` in place of `import horovod.torch as hvd`.

The script then runs under horovodrun as before, and under torchrun, mpirun, srun or alone too. Its own collectives
never mix with gradients that are on their way. What differs from Horovod: results of `allreduce`, `allgather` and
`broadcast` are detached from autograd, and objects are not pickled, so they must be what `dgcopt.broadcast_object`
takes. Names that are missing here, such as those that end in `_async`, are Horovod's alone.

Before `hvd.init()`, all of these but DistributedOptimizer raise ConfigError, a ValueError.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import broadcast as start_alike
from .collectives import AllGather, AllReduce, Barrier, Broadcast
from .collectives import Op as Reduction
from .comm import Comm, current_comm
from .comm import init as join_wire
from .comm import shutdown as leave_wire
from .compressors import BF16, FP16, NoCompression
from .errors import ConfigError, MismatchError
from .optimizer import DistributedOptimizer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

Average, Sum, Adasum, Min, Max = range(5)
"""The same numbers as Horovod's, so that either library's can be given to the other."""

_REDUCTIONS: dict[Any, Reduction] = {Average: "average", Sum: "sum", Min: "min", Max: "max"}


class Compression:
    """Where Horovod's scripts look for compressors; any other `dgcopt.Compressor` can be given in their place."""

    none = NoCompression()
    fp16 = FP16()
    bf16 = BF16()


class ProcessSet:
    """Some of the ranks, for collectives and DistributedOptimizer, once `init` or `add_process_set` has added it."""

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self._comm: Comm | None = None

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return rank() in self.ranks

    def rank(self) -> int | None:
        """This rank's place in the set; None outside."""
        return self.ranks.index(rank()) if self.included() else None

    def size(self) -> int:
        """How many ranks the set has."""
        return len(self.ranks)


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0  # by which DistributedOptimizer knows Horovod's, too

_added: list[ProcessSet] = []
_world: Comm | None = None
"""The ranks that there are; others once `hvd.elastic.run` has started Horovod anew."""


# -- joining ---------------------------------------------------------------------------------------------------------


def init(*, process_sets: Iterable[ProcessSet] | Literal["dynamic"] = ()) -> None:
    """Join the other ranks by `dgcopt.init()`, unless that has been done, and add `process_sets`.

    Called again, it only adds sets; "dynamic" is accepted because sets can always be added.
    """
    if not is_initialized():
        _add_world(join_wire())
    if process_sets != "dynamic":
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks, so that `init` joins anew; process sets must be added anew, too."""
    _leave_sets()
    leave_wire()


def _leave_sets() -> None:
    while _added:
        process_set = _added.pop()
        if process_set._comm is not None:
            process_set._comm.close()
        process_set._comm = None


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return global_process_set._comm is not None


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make these ranks a group of their own and return it; every rank must call it with the same ranks."""
    _joined()
    return _add(process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set))


def _add(process_set: ProcessSet) -> ProcessSet:
    # a comm of its own for all ranks, too: on some wires the comm of the optimizers would match by order alone
    process_set._comm = current_comm().among(process_set.ranks)
    _added.append(process_set)
    return process_set


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


def _comm_of(process_set: ProcessSet) -> Comm:
    me = _joined().rank
    if process_set._comm is None:
        raise ConfigError(f"{process_set} has not been added: hvd.add_process_set() does, on all ranks")
    if me not in process_set.ranks:
        raise ConfigError(f"rank {me} is not in {process_set}, so it takes no part in its collectives")
    return process_set._comm


# -- who is there ----------------------------------------------------------------------------------------------------


def rank() -> int:
    """This process's number, from 0."""
    return _joined().rank


def size() -> int:
    """How many processes there are."""
    return _joined().size


def local_rank() -> int:
    """This process's number on its machine."""
    return _joined().local_rank


def local_size() -> int:
    """How many processes there are on this machine."""
    return _joined().local_size


def cross_rank() -> int:
    """This process's number among those of the same local rank, one on each machine."""
    return _joined().cross_rank


def cross_size() -> int:
    """How many processes have this local rank, one on each machine."""
    return _joined().cross_size


# -- collectives -----------------------------------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average of the ranks' tensors, or what `op` says: Average, Sum, Min or Max. `name` goes into errors."""
    return allreduce_(tensor.detach().clone(), average, name, op=op, process_set=process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place."""
    comm = _comm_of(process_set)
    if average is not None and op is not None:
        raise ConfigError("give op or average, not both")
    chosen = (Sum if average is False else Average) if op is None else op
    if chosen not in _REDUCTIONS:
        raise ConfigError(f"op must be hvd.Average, Sum, Min or Max here, not {op!r}")
    message = comm.to_wire(tensor.detach().clone())
    result = comm.run(AllReduce(message, op=_REDUCTIONS[chosen], label=f"hvd.allreduce {name or ''}"))
    tensor.detach().copy_(result)
    return tensor


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, one after another along the first dimension, which may be longer on some ranks.

    Raises MismatchError if they differ in dtype or in other dimensions.
    """
    comm, label = _comm_of(process_set), f"hvd.allgather {name or ''}"
    rows = torch.atleast_1d(tensor.detach())
    kind = f"{rows.dtype} of shape (any, {', '.join(map(str, rows.shape[1:]))})"
    mine = comm.to_wire(torch.tensor([len(rows), zlib.crc32(kind.encode())]))
    lengths, kinds = comm.run(AllGather(mine, label=f"lengths for {label}")).T.tolist()
    if len(set(kinds)) > 1:
        raise MismatchError(f"{label}: rank {comm.rank} has {kind}, and not all ranks have the same")
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    if padded.numel() == 0:
        return rows.new_zeros(sum(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = comm.run(AllGather(comm.to_wire(padded), label=label))
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)]).to(tensor.device)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Rank `root_rank`'s tensor, of which every rank has one of the same shape and dtype."""
    return broadcast_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place."""
    comm = _comm_of(process_set)
    if root_rank not in process_set.ranks:
        raise ConfigError(f"root_rank {root_rank} is not in {process_set}")
    message = comm.to_wire(tensor.detach().clone())
    root = process_set.ranks.index(root_rank)
    tensor.detach().copy_(comm.run(Broadcast(message, root=root, label=f"hvd.broadcast {name or ''}")))
    return tensor


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here."""
    _comm_of(process_set).run(Barrier(label="hvd.barrier"))


# -- starting alike --------------------------------------------------------------------------------------------------


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite tensors with rank `root_rank`'s: a `state_dict()`, `named_parameters()` or a list of parameters."""
    listed = params.items() if isinstance(params, Mapping) else enumerate(params)
    pairs = [value if isinstance(value, tuple) else (str(name), value) for name, value in listed]
    start_alike.broadcast_parameters(pairs, root_rank, _comm_of(global_process_set))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Load rank `root_rank`'s optimizer state; `model` is what Horovod wants for sparse parameters, and unused."""
    start_alike.broadcast_optimizer_state(optimizer, root_rank, _comm_of(global_process_set))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Rank `root_rank`'s object on every rank; see `dgcopt.broadcast_object` for what it may be."""
    return start_alike.broadcast_object(obj, root_rank, _comm_of(global_process_set))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in a list by rank; they may be what `broadcast_object` takes."""
    return [broadcast_object(obj, root) for root in range(size())]
