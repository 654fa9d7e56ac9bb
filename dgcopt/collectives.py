"""The collectives, as values: what an algorithm yields and a wire carries out.

A compressor never calls a communication library. It yields one of these and is sent the result, so the same
generator runs over every wire, and every byte is counted where the values pass (`dgcopt.exchange.flights`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar, get_args

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
    "ReduceScatter",
    "SendRecv",
    "bytes_of",
    "carried",
    "check_generator",
    "is_joinable",
    "joined",
    "parted",
    "reduce_rows",
    "watched",
]

Result = TypeVar("Result")
Yielded = TypeVar("Yielded")

Op: TypeAlias = Literal["average", "sum", "min", "max"]
Group: TypeAlias = Literal["world", "node", "across", "control", "agreement"]
"""`world`: all ranks. `node`: those of one machine. `across`: one of each machine, those of equal local rank.

`control`: all ranks again, for small CPU tensors, matched apart from the other groups: ranks may start such a vote
before, between or after the same collectives of `world`, each in its own place. `agreement`: the same once more, for
what ranks compare before they go on: where one of them takes another path, no vote is taken for its answer.
"""

OPS: tuple[str, ...] = ("average", "sum", "min", "max")
GROUPS: tuple[str, ...] = get_args(Group)


@dataclass(frozen=True)
class Link:
    """How fast a wire is; by default 1 Gbit/s and 0.1 ms.

    Attributes: `latency`, the seconds that the smallest collective takes; `bandwidth`, bytes that a rank receives in a
    second.
    """

    latency: float = 1e-4
    bandwidth: float = 125e6


@dataclass(eq=False)
class Collective:
    """One collective of one rank: every rank of `group` must yield the same kind with an equal shape and dtype.

    `tensor` belongs to the collective until its result is there, and may be overwritten. `label` names it in
    errors; all ranks must use the same one. `user` is who started it, by the number that `Comm.attend` gave. Raises
    ConfigError for what is no dense tensor, or no group.
    """

    tensor: Tensor
    group: Group = field(default="world", kw_only=True)
    label: str = field(default="", kw_only=True)
    user: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise ConfigError(
                f"{type(self).__name__} takes one tensor, not {type(self.tensor).__name__}: yield a collective for "
                f"each of several, or put them into one (torch.cat, tensor.view(torch.uint8))"
            )
        if self.tensor.layout != torch.strided:
            raise ConfigError(
                f"{type(self).__name__} takes a dense tensor, not one of layout {self.tensor.layout}: send its indices "
                f"and values, or tensor.to_dense()"
            )
        if self.group not in GROUPS:
            raise ConfigError(f"group must be one of {', '.join(GROUPS)}, not {self.group!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's message."""
        return self.tensor.numel() * self.tensor.element_size()

    def sent(self, size: int) -> int:
        """Bytes that this rank puts on the wire among `size` ranks, by the bandwidth-optimal algorithm."""
        raise NotImplementedError

    def describe(self) -> str:
        """What every rank must agree on, in words."""
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{type(self).__name__}[{shape} {dtype}]" + (f" of {self.label}" if self.label else "")


@dataclass(eq=False)
class AllReduce(Collective):
    """Element-wise reduction over the group. Result: `tensor`'s shape, the same bits on every rank."""

    op: Op = "average"

    def sent(self, size: int) -> int:
        return 2 * self.nbytes * (size - 1) // size


@dataclass(eq=False)
class AllGather(Collective):
    """Everyone's tensor, of equal shape. Result: `[size, *tensor.shape]`, row r from the group's r-th rank."""

    def sent(self, size: int) -> int:
        return self.nbytes * (size - 1)


@dataclass(eq=False)
class ReduceScatter(Collective):
    """Reduction of which each rank keeps its part. First dimension divisible by size; result: the r-th part."""

    op: Op = "average"

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
    Result: what `source` sent, or `tensor` itself where `source` is None.
    """

    to: int | None = None
    source: int | None = None

    def sent(self, size: int) -> int:
        return self.nbytes if self.to is not None else 0


@dataclass(eq=False)
class Barrier(Collective):
    """No rank passes before all have come. Result: an empty tensor."""

    tensor: Tensor = field(default_factory=lambda: torch.empty(0))

    def sent(self, size: int) -> int:
        return 0


Exchange: TypeAlias = Generator[Collective, Tensor, Tensor]
"""An algorithm in flight: yields collectives, is sent their results, returns the tensor it was run for."""


def check_generator(exchange: object) -> None:
    """Raises ConfigError for what is none: `yield from` would go through a tensor element by element."""
    if not isinstance(exchange, Generator):
        raise ConfigError(
            f"exchange() must be a generator, which yields collectives and returns what came of them, and this one has "
            f"returned {type(exchange).__name__}. One that sends nothing begins with `yield from ()`"
        )


def carried(
    exchange: Generator[Collective, Tensor, Result],
    carry: Callable[[Collective], Generator[Yielded, Tensor, Tensor]],
) -> Generator[Yielded, Tensor, Result]:
    """The same exchange, each collective of which is carried out by `carry`: yields what that yields.

    Raises ConfigError for what is no exchange.
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
                f"exchange() must yield collectives, such as AllReduce(tensor) of dgcopt.collectives, and has yielded "
                f"{type(collective).__name__}"
            )
        result = yield from carry(collective)


def watched(
    exchange: Generator[Collective, Tensor, Result], see: Callable[[Collective], object]
) -> Generator[Collective, Tensor, Result]:
    """The same exchange; `see` is shown, and may change, every collective before it is yielded."""

    def carry(collective: Collective) -> Exchange:
        see(collective)
        return (yield collective)

    return carried(exchange, carry)


def is_joinable(one: Collective, other: Collective) -> bool:
    """Whether both bring messages of one dtype to the same ranks, so that one collective can bring them `joined`."""
    return (
        isinstance(one, AllGather | AllToAll)
        and type(one) is type(other)
        and (one.group, one.tensor.dtype, one.tensor.device) == (other.group, other.tensor.dtype, other.tensor.device)
    )


def joined(collectives: Sequence[Collective]) -> Collective:
    """One collective for several: each rank's messages to another one behind each other."""
    first = collectives[0]
    if isinstance(first, AllToAll):
        return replace(first, tensor=torch.cat([one.tensor.flatten(1) for one in collectives], 1))
    return replace(first, tensor=torch.cat([one.tensor.flatten() for one in collectives]))


def parted(result: Tensor, collectives: Sequence[Collective]) -> list[Tensor]:
    """The results of several collectives, of the result of what was `joined` of them."""
    size, results = len(result), []
    shares = [size if isinstance(one, AllToAll) else 1 for one in collectives]
    widths = [one.tensor.numel() // share for one, share in zip(collectives, shares, strict=True)]
    for one, part in zip(collectives, result.split(widths, 1), strict=True):
        shape = one.tensor.shape if isinstance(one, AllToAll) else (size, *one.tensor.shape)
        results.append(part.contiguous().view(shape))
    return results


def bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The tensor's memory, or on other devices a copy of it, as a buffer to be read at once; NumPy is not needed."""
    here = tensor.detach().cpu().contiguous()
    nbytes = here.numel() * here.element_size()
    buffer = (ctypes.c_char * nbytes).from_address(here.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    buffer.tensor = here  # type: ignore[attr-defined]  # which must live as long
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
        total = total.div_(len(rows)) if total.is_floating_point() else total.div_(len(rows), rounding_mode="trunc")
    return total.to(rows.dtype)
