"""Collectives as values, which algorithms yield and wires carry out.

A compressor never calls a communication library. It yields a collective and receives the result, so the same generator
runs over every wire, and every byte is counted in one place (`dgcopt.exchange.scheduler`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from .errors import ConfigError

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Collective",
    "Exchange",
    "Group",
    "Link",
    "Op",
    "Rank",
    "ReduceScatter",
    "SendRecv",
    "bytes_of",
    "carried",
    "check_generator",
    "everyone",
    "in_memory",
    "is_joinable",
    "joined",
    "on_cpu",
    "parted",
    "reduce_rows",
    "watched",
]

Result = TypeVar("Result")
Yielded = TypeVar("Yielded")

Op: TypeAlias = Literal["average", "sum", "min", "max"]
Group: TypeAlias = Literal["world", "node", "across", "replica", "control", "agreement"]
"""`world`: all ranks. `node`: the ranks of one machine. `across`: one rank of each machine, with equal local ranks.
`replica`: the ranks that hold shards of one replica of the model, for small CPU tensors; this rank alone if
parameters are not sharded.

`control`: all ranks, for small CPU tensors, matched separately: ranks may start a vote at different places among the
collectives of `world`. `agreement`: all ranks, for comparisons, so that a rank on another path does not mistake a vote
for an answer.
"""


class Rank(int):
    """A rank's number within a group, shown in messages as its number among all ranks.

    For a group of some ranks, since users know only numbers among all.

    Attributes:
        name: its name in messages, such as "3 (replica 1)".
        everyone: all ranks of the group.
    """

    name: str
    everyone: Sequence[Rank]

    @staticmethod
    def of_group(names: Sequence[str]) -> Sequence[Rank]:
        """Return all ranks of a group, given their names."""
        ranks = [Rank(place) for place in range(len(names))]
        for rank, name in zip(ranks, names, strict=True):
            rank.name, rank.everyone = name, ranks
        return ranks

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # names last as long as the group


def everyone(rank: int, size: int) -> Sequence[int]:
    """Return all ranks of a group of that size, for messages, given one of them."""
    return rank.everyone if isinstance(rank, Rank) else range(size)


OPS: tuple[str, ...] = ("average", "sum", "min", "max")
GROUPS: tuple[str, ...] = get_args(Group)


@dataclass(frozen=True)
class Link:
    """The speed of a wire; by default 1 Gbit/s and 0.1 ms.

    Attributes:
        latency: seconds of the smallest collective.
        bandwidth: bytes per second that a rank receives.
    """

    latency: float = 1e-4
    bandwidth: float = 125e6


@dataclass(eq=False)
class Collective:
    """One collective of one rank: every rank of `group` must yield the same kind with an equal shape and dtype.

    `tensor` belongs to the collective until the result arrives, and may be overwritten. `label` names it in errors and
    must be equal on all ranks. `user` is the number of the user that started it (`Comm.attend`). Raises ConfigError for
    anything but a dense tensor, and for an unknown group.
    """

    tensor: Tensor
    group: Group = field(default="world", kw_only=True)
    label: str = field(default="", kw_only=True)
    user: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise ConfigError(
                f"{type(self).__name__} takes one tensor, not {type(self.tensor).__name__}. Yield one collective per "
                f"tensor, or concatenate them (torch.cat, tensor.view(torch.uint8))."
            )
        if self.tensor.layout != torch.strided:
            raise ConfigError(
                f"{type(self).__name__} takes a dense tensor, not layout {self.tensor.layout}. Send its indices and "
                f"values, or tensor.to_dense()."
            )
        if self.group not in GROUPS:
            raise ConfigError(f"group must be one of {', '.join(GROUPS)}, not {self.group!r}")

    def call(self, label: str, user: int | None) -> None:
        """Set the label, and the number of the user that starts it."""
        self.label, self.user = label, user

    def send(self, tensor: Tensor) -> None:
        """Replace the tensor."""
        self.tensor = tensor

    def to_group(self, group: Group) -> None:
        """Move the collective to another group."""
        self.group = group

    def send_beside(self, other: Collective) -> None:
        """Move the collective to the group and device of `other`."""
        self.group, self.tensor = other.group, self.tensor.to(other.tensor.device)

    @property
    def nbytes(self) -> int:
        """Number of bytes in this rank's message."""
        return self.tensor.numel() * self.tensor.element_size()

    def sent(self, size: int) -> int:
        """Return the bytes that this rank sends among `size` ranks, by the bandwidth-optimal algorithm."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the properties that must be equal on all ranks."""
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{type(self).__name__}[{shape} {dtype}]" + (f" of {self.label}" if self.label else "")


@dataclass(eq=False)
class AllReduce(Collective):
    """Element-wise reduction over the group. Result: `tensor`'s shape, the same bits on every rank.

    Raises ConfigError for an `op` that does not exist for the dtype, such as the average of bool.
    """

    op: Op = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_reduced(self, self.op)

    def sum_divided(self) -> None:
        """Sum messages that their senders have divided."""
        self.op = "sum"

    def sent(self, size: int) -> int:
        return 2 * self.nbytes * (size - 1) // size


@dataclass(eq=False)
class AllGather(Collective):
    """Gather the tensors of all ranks, of equal shape. Result: `[size, *tensor.shape]`, row r from the r-th rank."""

    def sent(self, size: int) -> int:
        return self.nbytes * (size - 1)


@dataclass(eq=False)
class ReduceScatter(Collective):
    """Reduction that leaves one part on each rank. First dimension divisible by size; result: the r-th part.

    Raises ConfigError for an `op` that does not exist for the dtype.
    """

    op: Op = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_reduced(self, self.op)

    def sum_divided(self) -> None:
        """Sum messages that their senders have divided."""
        self.op = "sum"

    def sent(self, size: int) -> int:
        return self.nbytes * (size - 1) // size


@dataclass(eq=False)
class AllToAll(Collective):
    """Row j of `tensor` (`[size, ...]`) goes to rank j. Result: the same shape, row j from rank j."""

    def sent(self, size: int) -> int:
        return self.nbytes * (size - 1) // size


@dataclass(eq=False)
class Broadcast(Collective):
    """The tensor of the group's `root`-th rank, on every rank."""

    root: int = 0

    def sent(self, size: int) -> int:
        return self.nbytes * (size - 1) // size  # the mean over ranks: one message to each of the others


@dataclass(eq=False)
class SendRecv(Collective):
    """Send `tensor` to the group's rank `to` while receiving an equal shape from `source`.

    Every rank of the group takes part; with `to` None it sends nothing, with `source` None it receives nothing.
    Result: the tensor from `source`, or `tensor` itself if `source` is None.
    """

    to: int | None = None
    source: int | None = None

    def sent(self, size: int) -> int:
        return self.nbytes if self.to is not None else 0


@dataclass(eq=False)
class Barrier(Collective):
    """Wait until all ranks have arrived. Result: an empty tensor."""

    tensor: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))

    def sent(self, size: int) -> int:
        return 0


Exchange: TypeAlias = Generator[Collective, Tensor, Tensor]
"""A running algorithm: yields collectives, receives their results, returns a tensor."""


PLAIN = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Dtypes with every `Op`."""


def _check_reduced(collective: Collective, op: Op) -> None:
    """Raise ConfigError if torch has no such reduction of the dtype, as not all wires would say so before they send."""
    if collective.tensor.dtype not in PLAIN:
        try:
            reduce_rows(collective.tensor.new_zeros(2, 1), op)
        except RuntimeError as error:
            dtype = str(collective.tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{collective.describe()}: there is no {op} of {dtype}. Use another op, or convert the tensor first "
                f"(tensor.float())"
            ) from error


def check_generator(exchange: object) -> None:
    """Raise ConfigError for anything but a generator: `yield from` would iterate over the elements of a tensor."""
    if not isinstance(exchange, Generator):
        raise ConfigError(
            f"exchange() must be a generator that yields collectives and returns the result, but it has returned "
            f"{type(exchange).__name__}. If it sends nothing, begin it with `yield from ()`."
        )


def in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor's elements one after the other in memory: flat, with no lazy conjugate or negative.

    Shares memory with `tensor` if it lies so already.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,))  # one element is contiguous by any strides


def on_cpu() -> AbstractContextManager[Any]:
    """Context in which exchanges run: tensors without a device are on the CPU, not on `torch.set_default_device`'s."""
    return nullcontext() if torch.empty(0).is_cpu else torch.device("cpu")


def carried(
    exchange: Generator[Collective, Tensor, Result],
    carry: Callable[[Collective], Generator[Yielded, Tensor, Tensor]],
) -> Generator[Yielded, Tensor, Result]:
    """Run an exchange with `carry` in place of each of its collectives; yields the values that `carry` yields.

    Raises ConfigError for anything but an exchange.
    """
    check_generator(exchange)
    result: Tensor | None = None
    while True:
        try:
            collective = exchange.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            return stop.value
        if not isinstance(collective, Collective):
            raise ConfigError(
                f"exchange() must yield collectives, such as dgcopt.collectives.AllReduce(tensor), but it has yielded "
                f"{type(collective).__name__}"
            )
        result = yield from carry(collective)


def watched(
    exchange: Generator[Collective, Tensor, Result], see: Callable[[Collective], object]
) -> Generator[Collective, Tensor, Result]:
    """Run an exchange, and call `see` with each collective before it is yielded; `see` may change it."""

    def carry(collective: Collective) -> Exchange:
        see(collective)
        return (yield collective)

    return carried(exchange, carry)


def is_joinable(one: Collective, other: Collective) -> bool:
    """Return True if one collective can carry both messages: same kind, group, dtype and device."""
    return (
        isinstance(one, AllGather | AllToAll)
        and type(one) is type(other)
        and (one.group, one.tensor.dtype, one.tensor.device) == (other.group, other.tensor.dtype, other.tensor.device)
    )


def joined(collectives: Sequence[Collective]) -> Collective:
    """Concatenate the messages of several collectives into one collective."""
    first = collectives[0]
    if isinstance(first, AllToAll):
        return replace(first, tensor=torch.cat([one.tensor.flatten(1) for one in collectives], 1))
    return replace(first, tensor=torch.cat([one.tensor.flatten() for one in collectives]))


def parted(result: Tensor, collectives: Sequence[Collective]) -> list[Tensor]:
    """Split the result of a `joined` collective into the results of its parts."""
    size, results = len(result), []
    shares = [size if isinstance(one, AllToAll) else 1 for one in collectives]
    widths = [one.tensor.numel() // share for one, share in zip(collectives, shares, strict=True)]
    for one, part in zip(collectives, result.split(widths, 1), strict=True):
        shape = one.tensor.shape if isinstance(one, AllToAll) else (size, *one.tensor.shape)
        results.append(part.contiguous().view(shape))
    return results


def bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the tensor's memory, or a host copy of it, as a read buffer, without NumPy."""
    here = tensor.detach().cpu().contiguous()
    nbytes = here.numel() * here.element_size()
    buffer = (ctypes.c_char * nbytes).from_address(here.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    buffer.tensor = here  # type: ignore[attr-defined]  # keeps the memory alive
    return buffer


def reduce_rows(rows: Tensor, op: Op) -> Tensor:
    """Reduce `[size, ...]` over its first dimension, in rank order; half precision accumulates in float32."""
    if op == "min":
        return rows.amin(0)
    if op == "max":
        return rows.amax(0)
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    if op == "average":
        is_whole = not (total.is_floating_point() or total.is_complex())
        total = total.div_(len(rows), rounding_mode="trunc" if is_whole else None)
    return total.to(rows.dtype)
