"""What an exchange may know of its place, and all that lasts from one step to the next."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from ..coding import Checks, Sent, read_checks
from ..collectives import AllReduce, Link
from ..errors import ConfigError
from ..flat.gradient import LocalGradient, SparseSum
from ..flat.segments import PerTensor, Segment
from ..flat.shard import Shard, Sharding
from ..flat.store import is_unsent
from ..kernels import BLOCK, Mixture, gather

__all__ = ["SUMS", "Absorbed", "Context", "at_least_float32"]

SUMS = "residual of the owner"
"""The memory of owners: what they have been sent and have not forwarded."""


class Absorbed(Enum):
    """Progress of an update of memory in place, which a rollback cannot undo."""

    NO = "memory is that of the last commit"
    PARTLY = "some of memory contains this step's gradient"
    WHOLLY = "all of memory contains this step's gradient"


@dataclass
class _Absorption:
    """The progress of `Context.absorbing`, one for a context and for those that `dataclasses.replace` makes of it."""

    progress: Absorbed = Absorbed.NO


@dataclass(eq=False)
class Context:
    """What an exchange may know of its place.

    Attributes:
        rank, size: this rank among all.
        op: "average" or "sum", what the user asked for.
        step: optimizer steps completed before this one.
        kind: what `Compressor.kind` said of the bucket's parameters.
        index: the bucket's place in the order in which all ranks launch them.
        node, nodes, local_rank, local_size: which machine this rank runs on, and its place there.
        segments: which span of the flat gradient belongs to which parameter.
        memory: flat tensors of the gradient's layout that persist from step to step and follow their parameters
            through checkpoints and new buckets, as the last step left them. Change them through `remember` or
            `advance`, whose result replaces them once the whole step has succeeded on every rank.
        link: how fast the wire is, the same on all ranks; measured if the compressor `asks_link`, else a guess.
        shards: memory of which this rank holds only the coordinates that it owns; see `shard`.
        shared: small tensors of any shape that are the same on all ranks, by kind and parameter name; they persist
            as `memory` does. Change them through `share`.
        scratch: whatever else the compressor keeps for this bucket; gone when buckets are built anew.
        local: the gradient where autograd left it, for compressors that read it there (`Compressor.in_place`).
        tally: what exchanges have counted, by the name of a `dgcopt.Telemetry` field, of which the caller takes it; see
            `count`.
        mixture: what the gradient becomes before it travels, and the result is to be taken out of again; only for
            compressors that do both themselves (`Compressor.mixes`).
        certain: whether all ranks have voted to take the step, so that only a wire that fails can keep them from it.
        peak: the largest magnitude that the exchange has met, if it has looked for it: NaN or Inf tells of a gradient
            that is not finite.
        looked_at: what has arrived and may hold NaN or Inf, see `look_at`.
        by_sender: messages as they are decoded, each a row per rank, to name the senders of NaN or Inf.
        refused: ranks whose messages hold NaN or Inf; see `refuse`.
        idle: kinds of unsent memory that the last exchange has not taken up: they are added to the gradient before this
            one, by `add_unsent`.
        prescale: what the gradient is multiplied by before the exchange, but memory is not.
        checks: of what has arrived, which are read together with those of other exchanges, before the step is settled.
    """

    rank: int
    size: int
    op: Literal["average", "sum"]
    step: int
    kind: Hashable
    segments: Sequence[Segment]
    memory: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    index: int = 0
    node: int = 0
    nodes: int = 1
    local_rank: int = 0
    local_size: int = 1
    shards: dict[str, Shard] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    link: Link = field(default_factory=Link)
    local: LocalGradient | None = None
    mixture: Mixture | None = None
    tally: Counter[str] = field(default_factory=Counter)
    certain: bool = False
    peak: Tensor | None = None
    idle: Sequence[str] = ()
    prescale: float = 1.0
    checks: Checks = field(default_factory=Checks)
    looked_at: list[Tensor] = field(default_factory=list)
    by_sender: list[Tensor] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    _absorption: _Absorption = field(default_factory=_Absorption)
    _taken: set[str] = field(default_factory=set)
    _added: dict[str, Tensor] = field(default_factory=dict)
    _next: dict[str, Tensor] = field(default_factory=dict)
    _spare: dict[str, Tensor] = field(default_factory=dict)
    _left: Tensor | None = None
    _later: list[Callable[[], object]] = field(default_factory=list)
    _shares: list[tuple[str, Segment, Tensor]] = field(default_factory=list)
    _kept: list[tuple[Mapping[str, Any], str, slice, Tensor]] = field(default_factory=list)
    _unused: set[Segment] = field(default_factory=set)
    _before: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def begin(
        self, step: int, certain: bool = False, local: LocalGradient | None = None, index: int | None = None
    ) -> None:
        """Prepare for the exchange of a step.

        Args:
            step: optimizer steps completed before.
            certain: True if all ranks have voted to take the step.
            local: the gradient, if it stays where autograd left it.
            index: the bucket's place among those of the step; None leaves it.
        """
        self.step, self.certain = step, certain
        self.local = local if local is not None else self.local
        self.index = self.index if index is None else index

    @property
    def divisor(self) -> int:
        """What a sum over ranks is divided by."""
        return self.size if self.op == "average" else 1

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        return self.segments[0].param.dtype

    @property
    def device(self) -> torch.device:
        """The parameters'."""
        return self.segments[0].param.device

    @property
    def numel(self) -> int:
        """Length of the flat gradient, gaps included."""
        return -(-self.segments[-1].stop // BLOCK) * BLOCK

    @property
    def absorbed(self) -> Absorbed:
        """Whether memory in place contains this step's gradient already; see `absorbing`."""
        return self._absorption.progress

    @property
    def tensors(self) -> PerTensor:
        """Statistics of a flat tensor per parameter."""
        if "tensors" not in self.scratch:
            self.scratch["tensors"] = PerTensor(self.segments)
        return self.scratch["tensors"]

    def dense(self, result: Tensor | SparseSum) -> Tensor:
        """What an exchange returned as a flat tensor of the parameters' dtype."""
        if isinstance(result, Tensor):
            return result.to(self.dtype)
        return result.add_to(torch.zeros(self.numel, dtype=self.dtype, device=self.device))

    def all_reduce(self, values: Tensor) -> tuple[AllReduce, Tensor]:
        """Return the allreduce of `values` in the parameters' dtype as `op` says, and the part of them that it adds up.

        In half precision wires may add up before they divide: so each rank divides first, and values are clamped such
        that no sum of finite ones overflows. The residual keeps the rest. The part is in the dtype of `values`, and may
        share memory with the message, which the allreduce overwrites.
        """
        if at_least_float32(self.dtype) == self.dtype:
            message = values.to(self.dtype)
            return AllReduce(message, op=self.op), message.to(values.dtype)
        wide = values.to(at_least_float32(self.dtype)) / self.divisor
        limit = largest_addend(self.dtype, self.size)
        message = torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(self.dtype)
        return AllReduce(message, op="sum"), (message.to(wide.dtype) * self.divisor).to(values.dtype)

    def add_residual(self, grad: Tensor, decay: float = 1.0) -> Tensor:
        """Error feedback: `grad` plus `decay` times what has not been sent; `grad` stays.

        The result lies where the memory's next state may, so that `keep_residual` need not copy it.
        """
        residual, ahead = self.residual()
        return torch.add(grad, residual, alpha=decay, out=ahead)

    def residual(self) -> tuple[Tensor, Tensor]:
        """`add_residual` without its sum: what has not been sent, and where the sum may lie, yet to be written."""
        residual = self.hold("residual")
        ahead = self._spare.get("residual")
        if ahead is None or ahead.dtype != residual.dtype:
            ahead = self._spare["residual"] = torch.empty_like(residual)
        return residual, ahead

    def keep_residual(self, left: Tensor) -> None:
        """What has not been sent this time. `left` must stay as it is until the exchange is over.

        Of several calls the last counts. Raises ConfigError for another shape than the gradient's.
        """
        if left.shape != (self.numel,):
            raise ConfigError(
                f"what is kept must have the shape of the gradient, {(self.numel,)}, not {tuple(left.shape)}: zeros "
                f"where nothing waits"
            )
        self.tensors.clear_gaps(left)
        self._next.pop("residual", None)
        if left is self._spare.get("residual"):
            self._next["residual"], self._left = self._spare.pop("residual"), None
        else:
            residual, self._left = self.hold("residual"), left
            self.on_commit(lambda: residual.copy_(left) if left is self._left else None)

    def key(self, seed: int, own: bool = True) -> int:
        """64 bits, from which `dgcopt.kernels.draws` makes random numbers: of this step, bucket and, if `own`, rank."""
        return int.from_bytes(hashlib.blake2b(self._place(seed, own), digest_size=8).digest(), "little")

    def generator(self, seed: int, own: bool = False) -> torch.Generator:
        """Random numbers (on the CPU) of this step and bucket: the same on all ranks, or this rank's `own`."""
        return torch.Generator().manual_seed(zlib.crc32(self._place(seed, own)))

    def _place(self, seed: int, own: bool) -> bytes:
        """What random numbers are made from: they are the same wherever this is."""
        return f"{seed} {self.step} {self.index} {self.rank if own else 'all'}".encode()

    def share(self, kind: str, segment: Segment, value: Tensor) -> None:
        """Once the step has succeeded, `shared[kind]` of a parameter is `value`: the same bits on all ranks."""
        self._shares.append((kind, segment, value))

    def remember(self, kind: str, like: Tensor) -> Tensor:
        """The memory called `kind`, to be changed in place; zero at first, float32 where `like` is of half precision.

        What was held back is called "residual".
        """
        if kind in self._next:
            return self._next[kind]
        old, new = self.advance(kind, dtype=at_least_float32(like.dtype))
        return new.copy_(old)

    def advance(
        self,
        kind: str,
        start: Callable[[Segment], Tensor | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`remember` without its copy: the memory as it is, and as it will be, yet to be written, all but the gaps."""
        held = self.hold(kind, start, dtype)
        if kind not in self._next:
            spare = self._spare.pop(kind, None)
            self._next[kind] = torch.zeros_like(held) if spare is None else spare
        return held, self._next[kind]

    def hold(
        self,
        kind: str,
        start: Callable[[Segment], Tensor | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The memory as it is, to be read now, and to be changed in place only by what runs `on_commit`.

        `start` gives what a parameter's memory begins with, where that is not zero. `dtype` None is the parameters',
        but float32 where that is of half precision.
        """
        held = self.memory.get(kind)
        self._taken.add(kind)
        if held is not None and held is self._added.get(kind):
            held = None  # it is in the gradient already
        wanted = at_least_float32(self.dtype) if dtype is None else dtype
        if held is None:
            held = torch.zeros(self.numel, dtype=wanted, device=self.device)
            for segment in self.segments:
                value = None if start is None else start(segment)
                if value is not None:
                    segment.view(held).copy_(value)
            self.memory[kind] = held
        elif held.dtype != wanted:  # as a checkpoint left it
            held = self.memory[kind] = held.to(wanted)
        return held

    def shard(self, kind: str, sharding: Sharding) -> Shard:
        """The memory called `kind`, of which this rank has its share; zero at first, float32 at least.

        What a checkpoint of other ranks left it of other shares is added to "residual", which there has to be, as it is
        and as it will be.
        """
        self._taken.add(kind)
        if kind not in self.shards and kind not in self.memory:
            held = torch.zeros(sharding.length, dtype=at_least_float32(self.dtype), device=self.device)
            self.shards[kind] = Shard(sharding, self.rank, held)
        elif kind not in self.shards:
            self.shards[kind] = Shard.taken_from(self.hold(kind), sharding, self.rank)
            self.merge_into_residual(kind)
        return self.shards[kind]

    def merge_into_residual(self, kind: str) -> None:
        """Add memory called `kind`, whole or this rank's share, to "residual", which there has to be, and forget it.

        "residual" as it is, and as it will be: so it does not matter whether the step succeeds.
        """
        whole = self.memory.pop(kind) if kind in self.memory else self.shards.pop(kind).whole()
        if whole.any():
            for residual in (self.memory["residual"], self._next.get("residual"), self._left):
                if residual is not None:
                    residual.add_(whole)

    def add_unsent(self, grad: Tensor, kinds: Sequence[str] | None = None, weight: float = 1.0) -> None:
        """Add unsent memory, all or of some kinds, to a gradient that is sent whole: `weight` times.

        Once the step has succeeded it waits no more. If the exchange then asks for it, it finds zeros.
        """
        for kind in [kind for kind in self.memory if is_unsent(kind)] if kinds is None else kinds:
            held = self._added[kind] = self.memory[kind]
            grad.add_(held, alpha=weight)
            self._taken.add(kind)
            self.on_commit(held.zero_)

    def take_unsent(self) -> Tensor | None:
        """All unsent memory, which waits no more; None if there is none. Between exchanges."""
        kinds = [kind for kind in (*self.memory, *self.shards) if is_unsent(kind)]
        held = [self.memory.pop(kind) if kind in self.memory else self.shards.pop(kind).whole() for kind in kinds]
        self.idle = ()
        return torch.stack([each.to(at_least_float32(self.dtype)) for each in held]).sum(0) if held else None

    def keep_unsent(self) -> None:
        """What is unsent is for a later exchange to take up."""
        self._taken.update(filter(is_unsent, (*self.memory, *self.shards)))

    def on_commit(self, change: Callable[[], object]) -> None:
        """Run `change` when the step has succeeded, which changes memory in place."""
        self._later.append(change)

    def count(self, **numbers: int) -> None:
        """Add numbers to the tally when the step has succeeded."""
        self.on_commit(lambda: self.tally.update(numbers))

    def count_sent(self, sent: Sent) -> None:
        """Add the coordinates of a message to the tally, and how many of them are left out."""
        self.count(selected=len(sent.indices))
        if sent.travels is not None:
            self.checks.when_read((~sent.travels).sum(), lambda number: self.count(left_out=number))

    def look_at(self, arrived: Tensor, by_sender: Tensor | None = None) -> None:
        """Abort the step, on all ranks, if a tensor that has arrived on all of them holds NaN or Inf.

        For what is small beside the gradient, and not part of a SparseSum, which is looked at in any case. If the error
        is to name the senders, `by_sender` is what it was made of, with a row per rank.
        """
        self.looked_at.append(arrived)
        if by_sender is not None:
            self.by_sender.append(by_sender)

    def refuse(self, ranks: Iterable[int]) -> None:
        """Abort the step, as messages of `ranks` hold NaN or Inf; all ranks must do so alike."""
        self.refused.update(ranks)

    @contextmanager
    def for_now(self, flat: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """Memory that may be changed in place at some positions: afterwards it is again what it was."""
        before = (flat, positions, gather(flat, positions))
        self._before.append(before)  # should something interrupt the end of it
        try:
            yield flat
        finally:
            flat.index_copy_(0, positions, before[2])
            self._before = [other for other in self._before if other is not before]

    def prepare(self, used: Sequence[bool] | None = None) -> None:
        """Before `commit`: copy what stays as it is, the memory of parameters that no rank `used`."""
        kept: list[tuple[Mapping[str, Any], str, slice, Tensor]] = []
        unused = set()
        for segment, was_used in zip(self.segments, used or [True] * len(self.segments), strict=True):
            if not was_used:
                unused.add(segment)
                span = slice(segment.start, segment.stop)
                before = self.memory | self._added
                kept += [(self.memory, kind, span, held[span].clone()) for kind, held in before.items()]
                kept += [(self.shards, kind, span, held[span]) for kind, held in self.shards.items()]
        self._kept, self._unused = kept, unused

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Context for adding the gradient to memory in place, allowed once all ranks have voted (`certain`).

        If the step is aborted later, memory keeps the gradient for the next step, and `param.grad` is cleared.
        """
        self._absorption.progress = Absorbed.PARTLY
        yield
        self._absorption.progress = Absorbed.WHOLLY

    def commit(self, used: Sequence[bool] | None = None) -> None:
        """The step succeeded: what was to be remembered is, except of parameters that no rank `used`.

        Unsent memory that the exchange has not taken up, as another compressor may have left it in a checkpoint, is
        added to "residual", or is `idle` where the exchange has none. Raises PayloadError for a check that fails, which
        whoever commits a step has read before.
        """
        read_checks([self.checks])
        if used is not None:
            self.prepare(used)
        for kind, new in self._next.items():
            self.memory[kind], self._spare[kind] = new, self.memory[kind]
        for change in self._later:
            change()
        for memory, kind, span, values in self._kept:
            memory[kind][span] = values
        for kind, segment, value in self._shares:
            if segment not in self._unused:
                self.shared.setdefault(kind, {})[segment.name] = value
        taken, added = self._taken, self._added
        self._forget()
        self._pass_on(taken, added)

    def _pass_on(self, taken: Collection[str], added: Collection[str]) -> None:
        """Unsent memory that the exchange has not `taken` up is for the next one; what was `added` is gone, if zero."""
        idle = [kind for kind in (*self.memory, *self.shards) if is_unsent(kind) and kind not in taken]
        for kind in idle:
            if "residual" in taken:
                self.merge_into_residual(kind)
            elif kind in self.shards:
                self.memory[kind] = self.shards.pop(kind).whole()
        for kind in (*idle, *added):
            if kind in self.memory and not self.memory[kind].any():
                del self.memory[kind]
        self.idle = [kind for kind in idle if kind in self.memory]

    def rollback(self) -> None:
        """The step is void: the memory stays what it was before."""
        for flat, positions, values in self._before:
            flat.index_copy_(0, positions, values)
        self._spare |= self._next
        self.memory |= self._added
        self._forget()

    def _forget(self) -> None:
        self._next, self._later, self._shares = {}, [], []
        self._taken, self._added = set(), {}
        self._left, self.local, self.peak = None, None, None
        self._absorption.progress = Absorbed.NO
        self.checks.clear()
        self._kept, self._unused, self._before = [], set(), []
        self.looked_at, self.by_sender, self.refused = [], [], set()


def largest_addend(dtype: torch.dtype, size: int) -> float:
    """Return the largest number of `dtype` of which `size` add up to a finite sum, however partial sums are rounded."""
    most = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    addend = (most / size).to(dtype)
    if addend.double() * size > most:
        addend = addend.nextafter(torch.zeros_like(addend))
    return float(addend)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which memory adds up what gradients of `dtype` hold."""
    return torch.promote_types(dtype, torch.float32)
