"""The facts and the memory of one exchange: the second argument of a compressor."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..coding import Checks, Sent, read_checks
from ..collectives import AllReduce, Link
from ..flat.buckets import PerTensor, Segment
from ..flat.gradient import LocalGradient, SparseSum
from ..flat.memory import Memory, at_least_float32
from ..kernels import Mixture

__all__ = ["Context", "Place"]

Same = TypeVar("Same", bound="Context")


@dataclass(frozen=True)
class Place:
    """Read-only facts about the rank, the step and the bucket of an exchange.

    Attributes:
        rank, size: this rank among all.
        op: "average" or "sum", the user's choice.
        step: optimizer steps completed before this one.
        kind: `Compressor.kind` of the bucket's parameters.
        segments: the parameters' spans in the flat gradient.
        index: the bucket's place in the order in which all ranks launch them.
        node, nodes, local_rank, local_size: index of this rank's machine, number of machines, and its rank on it.
        link: latency and bandwidth of the wire, equal on all ranks; measured if the compressor `asks_link`, else a
            guess.
        prescale: factor on the gradient, but not on memory, before the exchange.
        gain: factor on the result after the exchange, by its caller or by a compressor around this one.
        share: this rank's weight in a mean over ranks, divided by `gradient_predivide_factor`: 1 unless that is set or
            ranks have run out of data. A gradient is given multiplied by it, weights are not.
    """

    rank: int
    size: int
    op: Literal["average", "sum"]
    step: int
    kind: Hashable
    segments: Sequence[Segment]
    index: int = 0
    node: int = 0
    nodes: int = 1
    local_rank: int = 0
    local_size: int = 1
    link: Link = field(default_factory=Link)
    prescale: float = 1.0
    gain: float = 1.0
    share: float = 1.0


@dataclass(eq=False)
class Context:
    """The facts, memory and checks of one exchange.

    `rank`, `size`, `op`, `step`, `kind`, `segments` and `index` are those of `place`.

    Attributes:
        place: facts about the rank, the step and the bucket.
        memory: flat tensors that are kept from step to step; changes take effect when all ranks commit the step.
        checks: checks of received data, read together with those of other exchanges before the commit.
        scratch: the compressor's cache for this bucket; lost when buckets are laid out anew.
        tally: counts by the name of a `dgcopt.Telemetry` field, which the caller collects; see `count`.
        local: the gradient in autograd's tensors, for compressors that read it in place (`Compressor.in_place`).
        certain: True once all ranks have voted to commit, so that only a failing wire can abort the step.
        mixture: the moving average to apply to the gradient before it is sent, and to invert in the result; only for
            compressors that do both themselves (`Compressor.mixes`).
        peak: the largest magnitude in the gradient, if the exchange has computed it: NaN or Inf for a gradient that is
            not finite.
        norm: the norm of all gradients of this replica, if this rank has only shards of them; see
            `Compressor.clips_model`.
    """

    place: Place
    memory: Memory
    checks: Checks = field(default_factory=Checks)
    scratch: dict[str, Any] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)
    local: LocalGradient | None = None
    certain: bool = False
    mixture: Mixture | None = None
    peak: Tensor | None = None
    norm: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def op(self) -> Literal["average", "sum"]:
        return self.place.op

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def kind(self) -> Hashable:
        return self.place.kind

    @property
    def segments(self) -> Sequence[Segment]:
        return self.place.segments

    @property
    def index(self) -> int:
        return self.place.index

    @property
    def divisor(self) -> int:
        """The divisor of a sum over ranks."""
        return self.place.size if self.place.op == "average" else 1

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        """The parameters'."""
        return self.memory.device

    @property
    def numel(self) -> int:
        """Length of the flat gradient, gaps included."""
        return self.memory.numel

    @property
    def tensors(self) -> PerTensor:
        """Statistics of a flat tensor per parameter."""
        return self.memory.tensors

    # -- for compressors ---------------------------------------------------------------------------------------------

    def add_residual(self, grad: Tensor, decay: float = 1.0) -> Tensor:
        """Return `grad` plus `decay` times the residual (error feedback), without changing `grad`.

        The result is in the memory's spare tensor, so that `keep_residual` need not copy it.
        """
        residual, ahead = self.memory.residual()
        return torch.add(grad, residual, alpha=decay, out=ahead)

    def keep_residual(self, left: Tensor) -> None:
        """Make `left` the residual after this step; see `Memory.keep_residual`."""
        self.memory.keep_residual(left)

    def dense(self, result: Tensor | SparseSum) -> Tensor:
        """Return the result of an exchange as a flat tensor of the parameters' dtype; look at a SparseSum's values."""
        if isinstance(result, Tensor):
            return result.to(self.dtype)
        if result.messages:  # a dense result is not checked
            arrived = pad_sequence([values for _, values in result.messages], batch_first=True)
            self.checks.check_finite(arrived, arrived if len(arrived) == self.size else None)
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

    def key(self, seed: int, own: bool = True) -> int:
        """Return a 64-bit seed for `dgcopt.kernels.draws`, distinct for each step, bucket and, if `own`, rank."""
        return int.from_bytes(hashlib.blake2b(self._seed(seed, own), digest_size=8).digest(), "little")

    def generator(self, seed: int, own: bool = False) -> torch.Generator:
        """Return a CPU generator for this step and bucket: the same on all ranks, or this rank's `own`."""
        return torch.Generator().manual_seed(zlib.crc32(self._seed(seed, own)))

    def _seed(self, seed: int, own: bool) -> bytes:
        """Return the text that seeds random numbers."""
        return f"{seed} {self.step} {self.index} {int(self.rank) if own else 'all'}".encode()

    def count(self, **numbers: int) -> None:
        """Add numbers to the tally at commit."""
        self.memory.on_commit(lambda: self.tally.update(numbers))

    def count_sent(self, sent: Sent) -> None:
        """Add the numbers of selected and of omitted coordinates of a message to the tally."""
        self.count(selected=len(sent.indices))
        if sent.fits is not None:
            self.checks.when_read((~sent.fits).sum(), lambda number: self.count(left_out=number))

    def set_norm(self, norm: Tensor | None) -> None:
        """Set the norm of all gradients of this replica."""
        self.norm = norm

    def set_peak(self, peak: Tensor | None) -> None:
        """Tell the largest magnitude in the gradient; None if it is not known."""
        self.peak = peak

    def placed(self: Same, **facts: Any) -> Same:
        """Return a context with other facts and the same memory."""
        return replace(self, place=replace(self.place, **facts))

    # -- for callers of exchanges ------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        certain: bool = False,
        local: LocalGradient | None = None,
        index: int | None = None,
        share: float = 1.0,
    ) -> None:
        """Prepare for the exchange of a step.

        Args:
            step: optimizer steps completed before.
            certain: True if all ranks have voted to take the step.
            local: the gradient, if it stays where autograd left it.
            index: the bucket's place among those of the step; None leaves it.
            share: the factor by which the gradient is multiplied already; see `Place`.
        """
        self.place = replace(self.place, step=step, index=self.index if index is None else index, share=share)
        self.certain = certain
        self.local = local if local is not None else self.local

    def commit(self, used: Sequence[bool] | None = None) -> None:
        """Commit memory, except for parameters that no rank `used`; None if that is prepared.

        Raises PayloadError if a check fails that the caller has not read before.
        """
        read_checks([self.checks])
        if used is not None:
            self.memory.prepare(used)
        self.memory.commit()
        self._end()

    def rollback(self) -> None:
        """Abort the step: memory is as of the last commit."""
        self.memory.rollback()
        self._end()

    def _end(self) -> None:
        self.local = self.peak = None
        self.checks.clear()


def largest_addend(dtype: torch.dtype, size: int) -> float:
    """Return the largest number of `dtype` such that a sum of `size` of them is finite in any rounding."""
    most = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    addend = (most / size).to(dtype)
    if addend.double() * size > most:
        addend = addend.nextafter(torch.zeros_like(addend))
    return float(addend)
