"""Horovod's collectives on tensors.

An operation is written once, as a function with Horovod's signature that returns a `Plan`. All variants are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter
from ..collectives import Op as Reduction
from ..comm import Comm, Finished
from ..errors import CommError, ConfigError
from ..exchange.agreement import DAMAGED
from .compression import Compression
from .variants import Handle, Plan, announce, asynchronous, blocking, grouped, in_place, synchronize
from .world import ProcessSet, comm_of, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Numbers equal to Horovod's, so that either library's constants work in the other."""

_REDUCTIONS: dict[Any, Reduction] = {Average: "average", Sum: "sum", Min: "min", Max: "max"}


# -- messages --------------------------------------------------------------------------------------------------------


def _factors(prescale: float, postscale: float) -> str:
    """Return the factors as text that is the same for 2 and 2.0."""
    return ", ".join(repr(float(factor)).removesuffix(".0") for factor in (prescale, postscale))


def _labels(operation: str, name: str | None, process_set: ProcessSet, factors: str = "1, 1") -> tuple[str, str]:
    """Return a collective's name for the comparison over ranks, and its label on the wire.

    Unnamed collectives are numbered on the wire, as Horovod refuses two of one name at a time. Factors are part of the
    label, as Horovod, which compares by itself, does not see them.
    """
    called = f"hvd.{operation}" if name is None else f"hvd.{operation} {name}"
    label = f"{called} {next(process_set.unnamed)}" if name is None else called
    return called, label if factors == "1, 1" else f"{label} with factors {factors}"


def _described(tensor: Tensor, *shape: Any) -> str:
    """Return a tensor's dtype and shape, or another `shape`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape or tuple(tensor.shape)}"


def _detached(tensor: Any, operation: str) -> Tensor:
    """Return the tensor without its graph. Raises ConfigError for any other object."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"hvd.{operation} takes a tensor, not {tensor!r:.200}: torch.tensor(...) makes one of numbers"
        )
    return tensor.detach()


def _started(comm: Comm, collective: Collective, finish: Callable[[Tensor], Any]) -> Handle:
    """Start a collective in the background if the wire has it as one; otherwise run it to its end."""
    collective.send(comm.to_wire(collective.tensor))
    if isinstance(collective, AllGather | ReduceScatter | AllToAll) and not collective.tensor.numel():
        gathers = isinstance(collective, AllGather)
        empty = collective.tensor.expand(comm.size, *collective.tensor.shape) if gathers else collective.tensor
        return Handle(lambda: True, lambda: finish(empty))
    if comm.checksums or not comm.supports(collective):
        started: Any = Finished(collective, comm.run(collective))
    else:
        started = comm.start(collective)
    return Handle(started.done, lambda: finish(comm.wait(started)))


def _padded(rows: Tensor, lengths: Sequence[int], most: int) -> Tensor:
    """Return consecutive parts of `rows` by their `lengths`, each padded with zeros to `most` rows."""
    padded = rows.new_zeros(len(lengths), most, *rows.shape[1:])
    for block, part in zip(padded, rows.split([*lengths]), strict=True):
        block[: len(part)] = part
    return padded


def _padded_to_all(rows: Tensor, lengths: Sequence[int], announced: Tensor, plan: str, comm: Comm) -> Tensor:
    """Return `_padded` parts with room for the most rows that any rank announced. Raises CommError if there is none."""
    try:
        if int(announced.min()) < 0:
            raise ValueError("fewer than none")
        return _padded(rows, lengths, int(announced.max()))
    except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
        raise CommError(
            f"rank {comm.rank}: {plan}: there is no room for the rows that ranks announced, which are, a line for "
            f"each rank, {announced.tolist()}: {DAMAGED}"
        ) from error


# -- reductions ------------------------------------------------------------------------------------------------------


def _reduction(op: Any, average: bool | None) -> Any:
    """Return the reduction by `op` or by Horovod's former argument `average`. Raises ConfigError for others."""
    if average is not None and op is not None:
        raise ConfigError("give op or average, not both")
    chosen = (Sum if average is False else Average) if op is None else op
    if chosen not in _REDUCTIONS and chosen != Product:
        raise ConfigError(f"op must be hvd.Average, Sum, Min, Max or Product here, not {op!r}")
    return chosen


def _scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """Return the tensor times `factor` over `divisor`; integers are rounded once, towards zero."""
    if factor == divisor == 1:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * (factor / divisor)
    return (tensor.double() * factor / divisor).to(tensor.dtype)


def _on_wire(op: Any, tensor: Tensor, postscale_factor: float, size: int) -> tuple[Any, int]:
    """Return the reduction on the wire and the divisor of its result: integers that are scaled travel as sums."""
    if op == Average and tensor.dtype == torch.bool:
        raise ConfigError(
            "there is no average of bool: convert it first (tensor.float()), or say op=hvd.Max or hvd.Min"
        )
    if op in (Min, Max) and tensor.is_complex():
        raise ConfigError(
            "complex numbers have no order, so no minimum or maximum: reduce both parts (torch.view_as_real(tensor)), "
            "or the magnitudes (tensor.abs())"
        )
    whole = op == Average and postscale_factor != 1 and not (tensor.is_floating_point() or tensor.is_complex())
    return (Sum, size) if whole else (op, 1)


def _allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Plan:
    """Reduce a tensor over ranks by `op`: Average, the default, Sum, Min, Max or Product.

    `name` goes into errors. The tensor is multiplied by `prescale_factor` before and by `postscale_factor` afterwards.
    The gradient of the result is reduced in the same way.
    """
    comm, op = comm_of(process_set), _reduction(op, average)
    message = _scaled(_detached(tensor, "allreduce").clone(), prescale_factor)
    on_wire, divisor = _on_wire(op, message, postscale_factor, comm.size)
    factors = _factors(prescale_factor, postscale_factor)
    called, label = _labels("allreduce", name, process_set, factors)

    def start(announced: Tensor) -> Handle:
        if on_wire == Product:
            return _started(comm, AllGather(message, label=label), lambda rows: finish(rows.prod(0, dtype=rows.dtype)))
        return _started(comm, AllReduce(message, op=_REDUCTIONS[on_wire], label=label), finish)

    def finish(result: Tensor) -> Tensor:
        return _scaled(result, postscale_factor, divisor).to(message.device)

    def backward(grad: Tensor) -> Tensor:
        if op not in (Average, Sum):
            raise ConfigError("gradients flow through hvd.allreduce with op=hvd.Average or hvd.Sum only")
        return allreduce(grad, None, None, Compression.none, op, prescale_factor, postscale_factor, process_set)

    how = f"with op {op} and factors {factors}"
    return Plan(comm, label, f"{called} {how}: {_described(message)}", start, backward)


def _reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Plan:
    """Return this rank's rows of the ranks' average or sum; the first ranks have one more if shares are uneven.

    The gradient of the result is gathered; with `op=hvd.Sum` it is multiplied by the number of ranks, as Horovod does.
    """
    comm = comm_of(process_set)
    if op not in (Average, Sum):
        raise ConfigError(f"op must be hvd.Average or hvd.Sum here, not {op!r}")
    if _detached(tensor, "reducescatter").dim() == 0:
        raise ConfigError("hvd.reducescatter takes tensors that have rows, not a scalar")
    on_wire, divisor = _on_wire(op, tensor, postscale_factor, comm.size)
    factors = _factors(prescale_factor, postscale_factor)
    called, label = _labels("reducescatter", name, process_set, factors)
    lengths = [len(tensor) // comm.size + (place < len(tensor) % comm.size) for place in range(comm.size)]

    def start(announced: Tensor) -> Handle:
        padded = _padded(_scaled(tensor.detach(), prescale_factor), lengths, lengths[0]).flatten(0, 1)
        return _started(comm, ReduceScatter(padded, op=_REDUCTIONS[on_wire], label=label), finish)

    def finish(mine: Tensor) -> Tensor:
        return _scaled(mine[: lengths[comm.rank]], postscale_factor, divisor).to(tensor.device)

    def backward(grad: Tensor) -> Tensor:
        factor = prescale_factor * postscale_factor * (comm.size if op == Sum else 1)
        return allgather(grad * factor, None, process_set)

    how = f"with op {op} and factors {factors}"
    return Plan(comm, label, f"{called} {how}: {_described(tensor)}", start, backward)


# -- gather, broadcast, alltoall -------------------------------------------------------------------------------------


def _allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Plan:
    """Concatenate the ranks' tensors along the first dimension, which may be longer on some ranks.

    The gradient of the result is averaged, and each rank gets that of its rows. Raises MismatchError if they differ
    in dtype or in other dimensions.
    """
    comm, rows = comm_of(process_set), torch.atleast_1d(_detached(tensor, "allgather"))
    called, label = _labels("allgather", name, process_set)

    def start(announced: Tensor) -> Handle:
        padded, lengths = _padded_to_all(rows, [len(rows)], announced, label, comm), announced.flatten().tolist()

        def finish(gathered: Tensor) -> Tensor:
            return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)]).to(tensor.device)

        return _started(comm, AllGather(padded[0], label=label), finish)

    def backward(grad: Tensor) -> Tensor:
        lengths = allgather(torch.tensor([len(rows)], device="cpu"), None, process_set).tolist()
        average = allreduce(grad, op=Average, process_set=process_set)
        return average.narrow(0, sum(lengths[: comm.rank]), len(rows)).view(tensor.shape)

    return Plan(comm, label, f"{called}: {_described(rows, 'any', *rows.shape[1:])}", start, backward, [len(rows)])


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Plan:
    """Return rank `root_rank`'s tensor; every rank gives one of the same shape and dtype.

    The root gets the average of the ranks' gradients, the others zeros.
    """
    comm, root, message = comm_of(process_set), process_set.place_of(root_rank), _detached(tensor, "broadcast").clone()
    called, label = _labels("broadcast", name, process_set)

    def start(announced: Tensor) -> Handle:
        return _started(comm, Broadcast(message, root=root, label=label), lambda result: result.to(message.device))

    def backward(grad: Tensor) -> Tensor:
        average = allreduce(grad, op=Average, process_set=process_set)
        return average if comm.rank == root else torch.zeros_like(average)

    return Plan(comm, label, f"{called} from rank {root_rank}: {_described(message)}", start, backward)


def _alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Plan:
    """Send `splits[r]` rows to rank r; the result is the rows received and their number from each rank."""
    comm, rows = comm_of(process_set), torch.atleast_1d(_detached(tensor, "alltoall"))
    even = [len(rows) // comm.size] * comm.size
    counts = even if splits is None else [int(count) for count in splits]
    fits = len(counts) == comm.size and min(counts) >= 0 and sum(counts) == len(rows)
    called, label = _labels("alltoall", name, process_set)
    incoming: list[int] = []

    def start(announced: Tensor) -> Handle:
        if (announced < 0).any():
            wrong = (announced < 0).any(1).nonzero().flatten().tolist()
            raise ConfigError(
                f"{label}: rank {comm.rank} has {len(rows)} row(s) and splits {counts}; on rank(s) {wrong} splits are "
                f"not {comm.size} numbers that add up to the rows"
            )
        incoming.extend(announced[:, comm.rank].tolist())
        return _started(comm, AllToAll(_padded_to_all(rows, counts, announced, label, comm), label=label), finish)

    def finish(blocks: Tensor) -> tuple[Tensor, Tensor]:
        like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
        parts = [block[:count] for block, count in zip(blocks, incoming, strict=True)]
        return torch.cat(parts).to(tensor.device), like.new_tensor(incoming)

    def backward(grad: Tensor) -> Tensor:
        return synchronize(alltoall_async(grad, incoming, None, process_set))[0]

    # splits that do not fit are announced as -1, because the other ranks would wait for this one
    numbers = counts if fits else [-1] * comm.size
    return Plan(comm, label, f"{called}: {_described(rows, 'any', *rows.shape[1:])}", start, backward, numbers)


# -- the table of operations -----------------------------------------------------------------------------------------

allreduce = blocking("allreduce", _allreduce)
allreduce_async = asynchronous("allreduce_async", _allreduce)
allreduce_async_ = in_place("allreduce_async_", allreduce_async)
allreduce_ = in_place("allreduce_", allreduce_async)
grouped_allreduce = grouped("grouped_allreduce", allreduce)
grouped_allreduce_async = grouped("grouped_allreduce_async", _allreduce)
grouped_allreduce_async_ = in_place("grouped_allreduce_async_", grouped_allreduce_async)
grouped_allreduce_ = in_place("grouped_allreduce_", grouped_allreduce_async)

reducescatter = blocking("reducescatter", _reducescatter)
reducescatter_async = asynchronous("reducescatter_async", _reducescatter)
grouped_reducescatter = grouped("grouped_reducescatter", reducescatter)
grouped_reducescatter_async = grouped("grouped_reducescatter_async", _reducescatter)

allgather = blocking("allgather", _allgather)
allgather_async = asynchronous("allgather_async", _allgather)
grouped_allgather = grouped("grouped_allgather", allgather)
grouped_allgather_async = grouped("grouped_allgather_async", _allgather)

broadcast = blocking("broadcast", _broadcast)
broadcast_async = asynchronous("broadcast_async", _broadcast)
broadcast_async_ = in_place("broadcast_async_", broadcast_async)
broadcast_ = in_place("broadcast_", broadcast_async)

alltoall_async = asynchronous("alltoall_async", _alltoall)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows to rank r, or equally many to each; returns the rows received.

    With `splits`, returns the number of rows from each rank too. The gradient is sent back to the ranks that the rows
    came from. Raises ConfigError on all ranks if splits do not add up to the rows.
    """
    output, counts = blocking("alltoall", _alltoall)(tensor, splits, name, process_set)
    return output if splits is None else (output, counts)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to reduce sparse tensors; returns a function that waits for their sum or average, not coalesced."""
    chosen = _reduction(op, None)
    if chosen not in (Average, Sum):
        raise ConfigError("sparse tensors are reduced by op=hvd.Average or hvd.Sum")
    indices = allgather_async(tensor._indices().T.contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> Tensor:
        gathered, places = synchronize(values), synchronize(indices).T
        limits = torch.tensor(tensor.shape[: tensor.sparse_dim()], device=places.device).unsqueeze(1)
        if len(gathered) != places.shape[1] or bool(((places < 0) | (places >= limits)).any()):
            raise CommError(
                f"rank {comm_of(process_set).rank}: hvd.sparse_allreduce_async {name}: {len(gathered)} values arrived "
                f"for {places.shape[1]} indices, not all of which lie within {tuple(tensor.shape)}: {DAMAGED}"
            )
        gathered = gathered / process_set.size() if chosen == Average else gathered
        return torch.sparse_coo_tensor(places, gathered, tensor.shape, device=gathered.device)

    return finish


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it."""
    comm = comm_of(process_set)
    announce(comm, "hvd.barrier", ["hvd.barrier"])
    comm.run(Barrier(label="hvd.barrier"))
