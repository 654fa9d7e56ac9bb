"""Read-only facts that an exchange may use about its bucket, step and rank, and its memory from step to step."""

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
"""The kind of owners' memory: sums of received coordinates that are not forwarded yet."""


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
    """Facts about the bucket, step and rank, and transactional memory, for one exchange.

    Attributes:
        rank, size: this rank among all.
        op: "average" or "sum", the user's choice.
        step: optimizer steps completed before this one.
        kind: `Compressor.kind` of the bucket's parameters.
        index: the bucket's place in the order in which all ranks launch them.
        node, nodes, local_rank, local_size: index of this rank's machine, number of machines, and its rank on it.
        segments: the parameters' spans in the flat gradient.
        memory: flat tensors of the gradient's layout as of the last commit, which follow their parameters through
            checkpoints and new buckets. Change them through `remember` or `advance`: the new tensors replace them when
            all ranks commit the step.
        link: latency and bandwidth of the wire, equal on all ranks; measured if the compressor `asks_link`, else a
            guess.
        shards: memory of the coordinates that this rank owns; see `shard`.
        shared: small tensors of any shape that are the same on all ranks, by kind and parameter name; they persist
            as `memory` does. Change them through `share`.
        scratch: the compressor's cache for this bucket; lost when buckets are laid out anew.
        local: the gradient in autograd's tensors, for compressors that read it in place (`Compressor.in_place`).
        tally: counts by the name of a `dgcopt.Telemetry` field, which the caller collects; see `count`.
        mixture: the moving average to apply to the gradient before it travels, and to invert in the result; only for
            compressors that do both themselves (`Compressor.mixes`).
        certain: True once all ranks have voted to commit, so that only a failing wire can abort the step.
        peak: the largest magnitude in the gradient, if the exchange has computed it: NaN or Inf for a gradient that is
            not finite.
        looked_at: received tensors that may hold NaN or Inf, see `look_at`.
        by_sender: decoded messages with a row per rank, to name the senders of NaN or Inf.
        refused: ranks with NaN or Inf in their messages; see `refuse`.
        idle: kinds of unsent memory that the last exchange did not use; `add_unsent` adds them to the gradient before
            this one.
        prescale: factor on the gradient, but not on memory, before the exchange.
        checks: checks of received messages, read together with those of other exchanges before the commit.
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
        """The divisor of a sum over ranks."""
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
        """How far memory in place already contains this step's gradient; see `absorbing`."""
        return self._absorption.progress

    @property
    def tensors(self) -> PerTensor:
        """Statistics of a flat tensor per parameter."""
        if "tensors" not in self.scratch:
            self.scratch["tensors"] = PerTensor(self.segments)
        return self.scratch["tensors"]

    def dense(self, result: Tensor | SparseSum) -> Tensor:
        """Return the result of an exchange as a flat tensor of the parameters' dtype."""
        if isinstance(result, Tensor):
            return result.to(self.dtype)
        return result.add_to(torch.zeros(self.numel, dtype=self.dtype, device=self.device))

    def all_reduce(self, values: Tensor) -> tuple[AllReduce, Tensor]:
        """Return the allreduce of `values` by `op` in the parameters' dtype, and the part of them that it sends.

        In half precision each rank divides before the sum, and values are clamped so that no sum of finite ones
        overflows. The residual keeps the rest. The sent part has the dtype of `values`, and may share memory with the
        message, which the allreduce overwrites.
        """
        if at_least_float32(self.dtype) == self.dtype:
            message = values.to(self.dtype)
            return AllReduce(message, op=self.op), message.to(values.dtype)
        wide = values.to(at_least_float32(self.dtype)) / self.divisor
        limit = largest_addend(self.dtype, self.size)
        message = torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(self.dtype)
        return AllReduce(message, op="sum"), (message.to(wide.dtype) * self.divisor).to(values.dtype)

    def add_residual(self, grad: Tensor, decay: float = 1.0) -> Tensor:
        """Return `grad` plus `decay` times the residual (error feedback), without changing `grad`.

        The result is in the memory's spare tensor, so that `keep_residual` need not copy it.
        """
        residual, ahead = self.residual()
        return torch.add(grad, residual, alpha=decay, out=ahead)

    def residual(self) -> tuple[Tensor, Tensor]:
        """Return the residual and an unwritten tensor for its sum with the gradient, as `add_residual` uses them."""
        residual = self.hold("residual")
        ahead = self._spare.get("residual")
        if ahead is None or ahead.dtype != residual.dtype:
            ahead = self._spare["residual"] = torch.empty_like(residual)
        return residual, ahead

    def keep_residual(self, left: Tensor) -> None:
        """Make `left` the residual after this step. It must not change until the exchange has ended.

        The last of several calls counts. Raises ConfigError if its shape is not the gradient's.
        """
        if left.shape != (self.numel,):
            raise ConfigError(
                f"a residual must have the shape of the gradient, {(self.numel,)}, not {tuple(left.shape)}: use zeros "
                f"for coordinates that were sent"
            )
        self.tensors.clear_gaps(left)
        self._next.pop("residual", None)
        if left is self._spare.get("residual"):
            self._next["residual"], self._left = self._spare.pop("residual"), None
        else:
            residual, self._left = self.hold("residual"), left
            self.on_commit(lambda: residual.copy_(left) if left is self._left else None)

    def key(self, seed: int, own: bool = True) -> int:
        """Return a 64-bit seed for `dgcopt.kernels.draws`, distinct for each step, bucket and, if `own`, rank."""
        return int.from_bytes(hashlib.blake2b(self._place(seed, own), digest_size=8).digest(), "little")

    def generator(self, seed: int, own: bool = False) -> torch.Generator:
        """Return a CPU generator for this step and bucket: the same on all ranks, or this rank's `own`."""
        return torch.Generator().manual_seed(zlib.crc32(self._place(seed, own)))

    def _place(self, seed: int, own: bool) -> bytes:
        """Return the text that seeds random numbers."""
        return f"{seed} {self.step} {self.index} {self.rank if own else 'all'}".encode()

    def share(self, kind: str, segment: Segment, value: Tensor) -> None:
        """Set `shared[kind]` of a parameter at commit; `value` has the same bits on all ranks."""
        self._shares.append((kind, segment, value))

    def remember(self, kind: str, like: Tensor) -> Tensor:
        """Return the next memory of a kind, to change in place; zero at first, float32 if `like` has half precision.

        The kind of unsent gradient is "residual".
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
        """Return the current memory of a kind, and the next one: unwritten except for its gaps, without a copy."""
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
        """Return the current memory of a kind, to read now, and to change in place only `on_commit`.

        `start` returns a parameter's initial memory, or None for zeros. `dtype` None is the parameters' dtype, or
        float32 if that has half precision.
        """
        held = self.memory.get(kind)
        self._taken.add(kind)
        if held is not None and held is self._added.get(kind):
            held = None  # already in the gradient
        wanted = at_least_float32(self.dtype) if dtype is None else dtype
        if held is None:
            held = torch.zeros(self.numel, dtype=wanted, device=self.device)
            for segment in self.segments:
                value = None if start is None else start(segment)
                if value is not None:
                    segment.view(held).copy_(value)
            self.memory[kind] = held
        elif held.dtype != wanted:  # loaded from a checkpoint
            held = self.memory[kind] = held.to(wanted)
        return held

    def shard(self, kind: str, sharding: Sharding) -> Shard:
        """Return this rank's shard of the memory of a kind; zero at first, float32 at least.

        Coordinates that a checkpoint of another world size gave this rank, but that it does not own now, are added to
        the current and the next "residual", which must exist.
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
        """Add the memory of a kind, whole or this rank's shard, to "residual", which must exist, and remove it.

        Both the current and the next residual get it, so a commit and an abort keep it alike.
        """
        whole = self.memory.pop(kind) if kind in self.memory else self.shards.pop(kind).whole()
        if whole.any():
            for residual in (self.memory["residual"], self._next.get("residual"), self._left):
                if residual is not None:
                    residual.add_(whole)

    def add_unsent(self, grad: Tensor, kinds: Sequence[str] | None = None, weight: float = 1.0) -> None:
        """Add `weight` times unsent memory, of all kinds or some, to a gradient that is sent whole.

        The memory is cleared at commit. An exchange that reads it meanwhile finds zeros.
        """
        for kind in [kind for kind in self.memory if is_unsent(kind)] if kinds is None else kinds:
            held = self._added[kind] = self.memory[kind]
            grad.add_(held, alpha=weight)
            self._taken.add(kind)
            self.on_commit(held.zero_)

    def take_unsent(self) -> Tensor | None:
        """Remove and return the sum of all unsent memory, or None if there is none. Call it between exchanges."""
        kinds = [kind for kind in (*self.memory, *self.shards) if is_unsent(kind)]
        held = [self.memory.pop(kind) if kind in self.memory else self.shards.pop(kind).whole() for kind in kinds]
        self.idle = ()
        return torch.stack([each.to(at_least_float32(self.dtype)) for each in held]).sum(0) if held else None

    def keep_unsent(self) -> None:
        """Keep all unsent memory for a later exchange."""
        self._taken.update(filter(is_unsent, (*self.memory, *self.shards)))

    def on_commit(self, change: Callable[[], object]) -> None:
        """Run `change`, which changes memory in place, at commit."""
        self._later.append(change)

    def count(self, **numbers: int) -> None:
        """Add numbers to the tally at commit."""
        self.on_commit(lambda: self.tally.update(numbers))

    def count_sent(self, sent: Sent) -> None:
        """Add the numbers of selected and of omitted coordinates of a message to the tally."""
        self.count(selected=len(sent.indices))
        if sent.travels is not None:
            self.checks.when_read((~sent.travels).sum(), lambda number: self.count(left_out=number))

    def look_at(self, arrived: Tensor, by_sender: Tensor | None = None) -> None:
        """Abort the step on all ranks if a tensor that all have received holds NaN or Inf.

        For tensors that are small compared with the gradient; a SparseSum is checked in any case. `by_sender` holds the
        same data with a row per rank, so that the error can name the senders.
        """
        self.looked_at.append(arrived)
        if by_sender is not None:
            self.by_sender.append(by_sender)

    def refuse(self, ranks: Iterable[int]) -> None:
        """Abort the step because messages of `ranks` hold NaN or Inf; all ranks must call it alike."""
        self.refused.update(ranks)

    @contextmanager
    def for_now(self, flat: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """Context in which memory may be changed in place at `positions`; their values are restored on exit."""
        before = (flat, positions, gather(flat, positions))
        self._before.append(before)  # for `rollback`, if the restore itself is interrupted
        try:
            yield flat
        finally:
            flat.index_copy_(0, positions, before[2])
            self._before = [other for other in self._before if other is not before]

    def prepare(self, used: Sequence[bool] | None = None) -> None:
        """Prepare `commit`: copy the memory of parameters that no rank `used`, which does not change."""
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
        """Make the next memory current, except for parameters that no rank `used`.

        Unsent memory that the exchange did not use, such as another compressor's from a checkpoint, is added to
        "residual", or becomes `idle` if the exchange has no residual. Raises PayloadError if a check fails that the
        caller has not read before.
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
        """Keep unsent memory that the exchange has not `taken` for the next one; remove `added` memory that is zero."""
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
        """Abort the step: memory is as of the last commit."""
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
    """Return the largest number of `dtype` such that a sum of `size` of them is finite in any rounding."""
    most = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    addend = (most / size).to(dtype)
    if addend.double() * size > most:
        addend = addend.nextafter(torch.zeros_like(addend))
    return float(addend)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of memory that accumulates gradients of `dtype`."""
    return torch.promote_types(dtype, torch.float32)
