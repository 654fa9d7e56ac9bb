"""Collectives on tensors, blocking or with a handle, and differentiable as Horovod's are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter
from ..collectives import Op as Reduction
from ..comm import Comm, Finished
from ..compressors import BF16, FP16, Compressor, NoCompression, accept
from ..errors import CommError, ConfigError
from ..exchange.agreement import DAMAGED, SAME_MODEL, compare
from .world import ProcessSet, comm_of, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Compression",
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
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = range(6)
"""The same numbers as Horovod's, so that either library's can be given to the other."""

_REDUCTIONS: dict[Any, Reduction] = {Average: "average", Sum: "sum", Min: "min", Max: "max"}


class ByHand:
    """A compressor that can also be applied to one tensor, as Horovod's can.

    Attributes: `compressor`, which DistributedOptimizer takes.
    """

    def __init__(self, compressor: Compressor, dtype: torch.dtype | None = None) -> None:
        self.compressor = compressor
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor as it travels, and what `decompress` needs to know."""
        rounds = self._dtype is not None and tensor.is_floating_point()
        return tensor.to(self._dtype) if rounds else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)

    def __repr__(self) -> str:
        return repr(self.compressor)


class Compression:
    """Where Horovod's scripts look for compressors; DistributedOptimizer takes any other `dgcopt.Compressor` too."""

    none = ByHand(NoCompression())
    fp16 = ByHand(FP16(), torch.float16)
    bf16 = ByHand(BF16(), torch.bfloat16)


# -- handles ---------------------------------------------------------------------------------------------------------


class Handle:
    """A collective in flight, for `poll` and `synchronize`."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self._is_done = is_done
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return self._finish is None or self._is_done()

    def result(self) -> Any:
        """Wait for the result."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.is_done()


def synchronize(handle: Handle) -> Any:
    """Wait for what was started with an `_async` function; returns its result."""
    return handle.result()


def _start(comm: Comm, collective: Collective, finish: Callable[[Tensor], Any]) -> Handle:
    """Start a collective in the background if the wire has it as one; otherwise run it here, to its end."""
    collective.tensor = comm.to_wire(collective.tensor)
    if comm.checksums or not comm.supports(collective):
        started: Any = Finished(collective, comm.run(collective))
    else:
        started = comm.start(collective)
    return Handle(started.done, lambda: finish(comm.wait(started)))


def _all(handles: Sequence[Handle]) -> Handle:
    return Handle(lambda: all(map(poll, handles)), lambda: [synchronize(handle) for handle in handles])


class _Differentiable(torch.autograd.Function):
    """A collective, and the one that its gradient goes through in backward."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.back = back
        return there(*[t.detach() if isinstance(t, Tensor) else t for t in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = ctx.back(*grads)
        return (None, None, *(back if isinstance(back, list) else [back]))


def _called(operation: str, name: str | None, process_set: ProcessSet) -> tuple[str, str]:
    """What the ranks call a collective, and its label on the wire.

    There those without a name are numbered, as Horovod takes no two alike at a time.
    """
    what = f"hvd.{operation}" if name is None else f"hvd.{operation} {name}"
    return what, f"{what} {next(process_set.unnamed)}" if name is None else what


def _announce(comm: Comm, label: str, lines: Sequence[str], numbers: Sequence[int] = ()) -> Tensor:
    """Every rank's `numbers`, a row each, of as many as there are ranks at most.

    Raises MismatchError, on all ranks, if `lines` differ: Horovod asks by itself what is called, other libraries would
    mix up the bytes, or end the process. An announcement has the same form whatever is called, so any two can meet.
    """
    asks_by_itself = comm.wire == "horovod"
    if asks_by_itself and not numbers:
        return torch.empty(comm.size, 0)
    text = "\n".join(lines)
    mine = torch.zeros(1 + comm.size, dtype=torch.int64)
    mine[0] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    mine[1 : 1 + len(numbers)] = torch.tensor(numbers)
    told = comm.run(AllGather(mine, group="control", label=f"announcement of {label}"))
    if told[:, 0].ne(told[0, 0]).any():
        remedy = f"{SAME_MODEL} All ranks must start their collectives in the same order."
        comm.drive(compare([*lines], comm.rank, label, remedy))
    return told[:, 1 : 1 + len(numbers)]


def _rows_for_all(rows: Tensor, announced: Tensor, comm: Comm, label: str, *blocks: int) -> Tensor:
    """Zeros for the most rows that any rank has `announced`, in each of `blocks`. Raises CommError if none can be."""
    most = int(announced.max())
    try:
        if int(announced.min()) < 0:
            raise ValueError("fewer than none")
        return rows.new_zeros(*blocks, most, *rows.shape[1:])
    except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
        raise CommError(
            f"rank {comm.rank}: {label}: there is no room for the rows that ranks announced, which are, a line for "
            f"each rank, {announced.tolist()}: {DAMAGED}"
        ) from error


def _form(tensor: Tensor, shape: Sequence[Any] | None = None) -> str:
    """A tensor's dtype and shape, for `_announce`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape if shape is None else shape)}"


def _named(tensors: Sequence[Tensor], name: str | None) -> list[tuple[Tensor, str | None]]:
    return [(tensor, name and f"{name}.{place}") for place, tensor in enumerate(tensors)]


# -- reductions ------------------------------------------------------------------------------------------------------


def _operation(op: Any, average: bool | None) -> Any:
    if average is not None and op is not None:
        raise ConfigError("give op or average, not both")
    chosen = (Sum if average is False else Average) if op is None else op
    if chosen not in _REDUCTIONS and chosen != Product:
        raise ConfigError(f"op must be hvd.Average, Sum, Min, Max or Product here, not {op!r}")
    return chosen


def _scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """The tensor times `factor`, over `divisor`; whole numbers are rounded once, towards zero."""
    if factor == divisor == 1:
        return tensor
    if tensor.is_floating_point():
        return tensor * (factor / divisor)
    return (tensor.double() * factor / divisor).to(tensor.dtype)


def _on_wire(op: Any, tensor: Tensor, postscale_factor: float, size: int) -> tuple[Any, int]:
    """What the wire is to do, and what is left to be divided by: the sum of whole numbers that are multiplied too."""
    if op == Average and tensor.dtype == torch.bool:
        raise ConfigError(
            "there is no average of bool: convert it first (tensor.float()), or say op=hvd.Max or hvd.Min"
        )
    whole = op == Average and postscale_factor != 1 and not tensor.is_floating_point()
    return (Sum, size) if whole else (op, 1)


def _own(tensor: Any, operation: str) -> Tensor:
    """What a collective is given, without its graph. Raises ConfigError for what is no tensor."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"hvd.{operation} takes a tensor, not {tensor!r:.200}: torch.tensor(...) makes one of numbers"
        )
    return tensor.detach()


def _half(tensor: Tensor, compression: Any) -> Tensor:
    """The tensor as `hvd.Compression` sends it."""
    compressor = accept(compression)
    for known in (Compression.none, Compression.fp16, Compression.bf16):
        if type(compressor) is type(known.compressor):
            return known.compress(tensor)[0] if isinstance(tensor, Tensor) else tensor
    raise ConfigError("this takes hvd.Compression.none, fp16 or bf16; other compressors are for gradients")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`, once all ranks have told what they call, in the same order everywhere."""
    return _allreduces([(tensor, name)], average, op, prescale_factor, postscale_factor, process_set)[0]


def _allreduces(
    named: Sequence[tuple[Tensor, str | None]],
    average: bool | None,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[Handle]:
    """Start `allreduce` of several tensors, told of together."""
    comm, op = comm_of(process_set), _operation(op, average)
    how = f"with op {op} and factors {prescale_factor}, {postscale_factor}"
    messages = [_scaled(_own(tensor, "allreduce").clone(), prescale_factor) for tensor, _ in named]
    chosen = [_on_wire(op, message, postscale_factor, comm.size) for message in messages]
    called = [_called("allreduce", name, process_set) for _, name in named]
    lines = [f"{what} {how}: {_form(message)}" for (what, _), message in zip(called, messages, strict=True)]
    _announce(comm, "hvd.allreduce", lines)

    def started(message: Tensor, label: str, chosen: Any, divisor: int, device: torch.device) -> Handle:
        def finish(result: Tensor) -> Tensor:
            return _scaled(result, postscale_factor, divisor).to(device)

        if chosen == Product:
            return _start(comm, AllGather(message, label=label), lambda rows: finish(rows.prod(0, dtype=rows.dtype)))
        return _start(comm, AllReduce(message, op=_REDUCTIONS[chosen], label=label), finish)

    return [
        started(message, label, *how_on_wire, message.device)
        for message, (_, label), how_on_wire in zip(messages, called, chosen, strict=True)
    ]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, in place."""
    return _into(tensor, allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def _into(tensor: Tensor, started: Handle) -> Handle:
    """The same collective in place."""

    def finish() -> Tensor:
        tensor.detach().copy_(started.result())
        return tensor

    return Handle(started.is_done, finish)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average of the ranks' tensors, or what `op` says: Average, Sum, Min, Max or Product.

    `name` goes into errors. The tensor is multiplied by `prescale_factor` before and by `postscale_factor` afterwards.
    The gradient of the result is reduced in the same way.
    """
    op = _operation(op, average)
    again = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}

    def there(tensor: Tensor) -> Tensor:
        return synchronize(allreduce_async(tensor, None, name, op, **again))  # type: ignore[arg-type]

    def back(grad: Tensor) -> Tensor:
        if op not in (Average, Sum):
            raise ConfigError("gradients flow through hvd.allreduce with op=hvd.Average or hvd.Sum only")
        return allreduce(grad, op=op, **again)  # type: ignore[arg-type]

    return _Differentiable.apply(there, back, _half(tensor, compression)).to(tensor.dtype)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` of several tensors."""
    rest = (op, prescale_factor, postscale_factor, process_set)
    return _all(_allreduces(_named(tensors, name), average, *rest))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_` of several tensors."""
    rest = (op, prescale_factor, postscale_factor, process_set)
    started = _allreduces(_named(tensors, name), average, *rest)
    return _all([_into(tensor, handle) for tensor, handle in zip(tensors, started, strict=True)])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of each of several tensors."""
    rest = (compression, op, prescale_factor, postscale_factor, process_set)
    return [allreduce(tensor, average, label, *rest) for tensor, label in _named(tensors, name)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce_` of each of several tensors."""
    rest = (op, prescale_factor, postscale_factor, process_set)
    return synchronize(grouped_allreduce_async_(tensors, average, name, *rest))


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to add up sparse tensors; call what it returns for their sum, or average, not coalesced."""
    chosen = _operation(op, None)
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
        return torch.sparse_coo_tensor(places, gathered, tensor.shape)

    return finish


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`, once all ranks have told what they call, in the same order everywhere."""
    comm = comm_of(process_set)
    if op not in (Average, Sum):
        raise ConfigError(f"op must be hvd.Average or hvd.Sum here, not {op!r}")
    if _own(tensor, "reducescatter").dim() == 0:
        raise ConfigError("hvd.reducescatter takes tensors that have rows, not a scalar")
    chosen, divisor = _on_wire(op, tensor, postscale_factor, comm.size)
    what, label = _called("reducescatter", name, process_set)
    how = f"with op {op} and factors {prescale_factor}, {postscale_factor}"
    _announce(comm, label, [f"{what} {how}: {_form(tensor)}"])
    lengths = [len(tensor) // comm.size + (place < len(tensor) % comm.size) for place in range(comm.size)]
    rows = _scaled(tensor.detach(), prescale_factor)
    padded = rows.new_zeros(comm.size, lengths[0], *rows.shape[1:])
    for block, part in zip(padded, rows.split(lengths), strict=True):
        block[: len(part)] = part

    def finish(mine: Tensor) -> Tensor:
        return _scaled(mine[: lengths[comm.rank]], postscale_factor, divisor).to(tensor.device)

    if padded.numel() == 0:
        return Handle(lambda: True, lambda: finish(padded.flatten(0, 1)))
    return _start(comm, ReduceScatter(padded.flatten(0, 1), op=_REDUCTIONS[chosen], label=label), finish)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the ranks' average, or sum; the first ranks have one more if they cannot be shared evenly.

    The gradient of the result is gathered; with `op=hvd.Sum` it is multiplied by the number of ranks, as Horovod does.
    """

    def there(tensor: Tensor) -> Tensor:
        return synchronize(reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor))

    def back(grad: Tensor) -> Tensor:
        factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        return allgather(grad * factor, process_set=process_set)

    return _Differentiable.apply(there, back, _half(tensor, compression)).to(tensor.dtype)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter` of several tensors."""
    rest = (op, process_set, prescale_factor, postscale_factor)
    return _all([reducescatter_async(tensor, label, *rest) for tensor, label in _named(tensors, name)])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each of several tensors."""
    rest = (compression, op, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, label, *rest) for tensor, label in _named(tensors, name)]


# -- gather, broadcast, alltoall -------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start `allgather`, once all ranks have told how much they have, in the same order everywhere."""
    comm, rows = comm_of(process_set), torch.atleast_1d(_own(tensor, "allgather"))
    what, label = _called("allgather", name, process_set)
    lines = [f"{what}: {_form(rows, ('any', *rows.shape[1:]))}"]
    announced = _announce(comm, label, lines, [len(rows)])
    padded, lengths = _rows_for_all(rows, announced, comm, label), announced.flatten().tolist()
    if padded.numel() == 0:
        return Handle(lambda: True, lambda: rows.new_zeros(sum(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows

    def finish(gathered: Tensor) -> Tensor:
        parts = [part[:length] for part, length in zip(gathered, lengths, strict=True)]
        return torch.cat(parts).to(tensor.device)

    return _start(comm, AllGather(padded, label=label), finish)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, one after another along the first dimension, which may be longer on some ranks.

    The gradient of the result is averaged, and each rank gets that of its rows. Raises MismatchError if they differ
    in dtype or in other dimensions.
    """

    def back(grad: Tensor) -> Tensor:
        mine = torch.atleast_1d(tensor)
        lengths = allgather(torch.tensor([len(mine)]), process_set=process_set).tolist()
        place = process_set.ranks.index(comm_of(global_process_set).rank)
        average = allreduce(grad, op=Average, process_set=process_set)
        return average.narrow(0, sum(lengths[:place]), len(mine)).view(tensor.shape)

    return _Differentiable.apply(lambda t: synchronize(allgather_async(t, name, process_set)), back, tensor)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather` of several tensors."""
    return _all([allgather_async(tensor, label, process_set) for tensor, label in _named(tensors, name)])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of each of several tensors."""
    return [allgather(tensor, label, process_set) for tensor, label in _named(tensors, name)]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast`, once all ranks have told what they call, in the same order everywhere."""
    comm, root, message = comm_of(process_set), process_set.place_of(root_rank), _own(tensor, "broadcast").clone()
    what, label = _called("broadcast", name, process_set)
    _announce(comm, label, [f"{what} from rank {root_rank}: {_form(message)}"])
    return _start(comm, Broadcast(message, root=root, label=label), lambda result: result.to(tensor.device))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `broadcast_async`, in place."""
    return _into(tensor, broadcast_async(tensor, root_rank, name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Rank `root_rank`'s tensor, of which every rank has one of the same shape and dtype.

    The root gets the average of the ranks' gradients, the others zeros.
    """

    def back(grad: Tensor) -> Tensor:
        average = allreduce(grad, op=Average, process_set=process_set)
        return average if comm_of(global_process_set).rank == root_rank else torch.zeros_like(average)

    def there(tensor: Tensor) -> Tensor:
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    return _Differentiable.apply(there, back, tensor)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`, once all ranks have told how much they send; the result is always the pair."""
    comm, rows = comm_of(process_set), torch.atleast_1d(_own(tensor, "alltoall"))
    even = [len(rows) // comm.size] * comm.size
    counts = even if splits is None else [int(count) for count in splits]
    fits = len(counts) == comm.size and min(counts) >= 0 and sum(counts) == len(rows)
    # a rank whose splits do not fit says so, because the others would wait for it
    what, label = _called("alltoall", name, process_set)
    lines = [f"{what}: {_form(rows, ('any', *rows.shape[1:]))}"]
    told = _announce(comm, label, lines, counts if fits else [-1] * comm.size)
    if (told < 0).any():
        wrong = (told < 0).any(1).nonzero().flatten().tolist()
        raise ConfigError(
            f"{label}: rank {comm.rank} has {len(rows)} row(s) and splits {counts}; on rank(s) {wrong} splits are not "
            f"{comm.size} numbers that add up to the rows"
        )
    padded, incoming = _rows_for_all(rows, told, comm, label, comm.size), told[:, comm.rank].tolist()
    for block, part in zip(padded, rows.split(counts), strict=True):
        block[: len(part)] = part

    def finish(blocks: Tensor) -> tuple[Tensor, Tensor]:
        parts = [block[:count] for block, count in zip(blocks, incoming, strict=True)]
        like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
        return torch.cat(parts).to(tensor.device), like.new_tensor(incoming)

    if padded.numel() == 0:
        return Handle(lambda: True, lambda: finish(padded))
    return _start(comm, AllToAll(padded, label=label), finish)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows to rank r, or as many to each; what has come, and with `splits` how many rows from each.

    The gradient is sent back to where the rows came from. Raises ConfigError, on all ranks, where splits do not add up
    to the rows.
    """
    received: list[Tensor] = []

    def there(tensor: Tensor) -> Tensor:
        output, counts = synchronize(alltoall_async(tensor, splits, name, process_set))
        received.append(counts)
        return output

    def back(grad: Tensor) -> Tensor:
        return alltoall(grad, received[0], None, process_set)[0]

    output = _Differentiable.apply(there, back, tensor)
    return output if splits is None else (output, received[0])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here."""
    comm = comm_of(process_set)
    _announce(comm, "hvd.barrier", ["hvd.barrier"])
    comm.run(Barrier(label="hvd.barrier"))
