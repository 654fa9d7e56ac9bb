"""What every compressor is: an exchange of one flat gradient, written as a generator of collectives.

A new compressor is a subclass with either

- `compress(grad, ctx) -> payload` and `decompress(payloads, ctx) -> grad`, where one collective carries it, or
- `exchange(grad, ctx)`, a generator that yields collectives, is sent their results and returns the averaged gradient.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..collectives import AllGather, AllReduce, Collective
from ..errors import ConfigError
from ..own_step import updates_add_up
from ..segments import BLOCK, LocalGradient, PerTensor, Segment, SparseSum

__all__ = ["Compressor", "Context", "GradientExchange", "Source"]

log = logging.getLogger("dgcopt")

Source: TypeAlias = Literal["auto", "gradient", "update"]
"""What travels: the local gradient, or the update that the wrapped optimizer makes of it; see `Compressor.source`."""

GradientExchange: TypeAlias = Generator[Collective, Tensor, Tensor | SparseSum]
"""What exchanges a gradient: yields collectives, is sent their results, returns what all ranks share."""


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
        shared: small tensors of any shape that are the same on all ranks, by kind and parameter name; they persist
            as `memory` does. Change them through `share`.
        scratch: whatever else the compressor keeps for this bucket; gone when buckets are built anew.
        local: the gradient where autograd left it, for compressors that read it there (`Compressor.in_place`).
        certain: whether all ranks have voted to take the step, so that only a wire that fails can keep them from it.
        peak: the largest magnitude that the exchange has met, if it has looked for it: NaN or Inf tells of a gradient
            that is not finite.
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
    scratch: dict[str, Any] = field(default_factory=dict)
    local: LocalGradient | None = None
    certain: bool = False
    peak: Tensor | None = None
    _next: dict[str, Tensor] = field(default_factory=dict)
    _spare: dict[str, Tensor] = field(default_factory=dict)
    _later: list[Callable[[], object]] = field(default_factory=list)
    _shares: list[tuple[str, Segment, Tensor]] = field(default_factory=list)

    @property
    def divisor(self) -> int:
        """What a sum over ranks is divided by."""
        return self.size if self.op == "average" else 1

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        return self.segments[0].param.dtype

    @property
    def numel(self) -> int:
        """Length of the flat gradient, gaps included."""
        return -(-self.segments[-1].stop // BLOCK) * BLOCK

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
        return result.add_to(torch.zeros(self.numel, dtype=self.dtype, device=self.segments[0].param.device))

    def add_residual(self, grad: Tensor, decay: float = 1.0) -> Tensor:
        """Error feedback: `grad` plus `decay` times what has not been sent, in place unless memory is more precise."""
        residual = self.hold("residual")
        return grad.to(residual.dtype).add_(residual, alpha=decay)

    def keep_residual(self, left: Tensor) -> None:
        """What has not been sent this time. `left` must stay as it is until the exchange is over."""
        residual = self.hold("residual")
        self.tensors.clear_gaps(left)
        self.once_settled(lambda: residual.copy_(left))

    def generator(self, seed: int, own: bool = False) -> torch.Generator:
        """Random numbers (on the CPU) of this step and bucket: the same on all ranks, or this rank's `own`."""
        words = f"{seed} {self.step} {self.index} {self.rank if own else 'all'}"
        return torch.Generator().manual_seed(zlib.crc32(words.encode()))

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
        """The memory as it is, to be read now, and to be changed in place only by what runs `once_settled`.

        `start` gives what a parameter's memory begins with, where that is not zero. `dtype` None is the parameters',
        but float32 where that is of half precision.
        """
        held = self.memory.get(kind)
        wanted = at_least_float32(self.dtype) if dtype is None else dtype
        if held is None:
            held = self.memory[kind] = torch.zeros(self.numel, dtype=wanted, device=self.segments[0].param.device)
            for segment in self.segments:
                value = None if start is None else start(segment)
                if value is not None:
                    segment.view(held).copy_(value)
        elif held.dtype != wanted:  # as a checkpoint left it
            held = self.memory[kind] = held.to(wanted)
        return held

    def once_settled(self, change: Callable[[], object]) -> None:
        """Run `change` when the step has succeeded, which changes memory in place."""
        self._later.append(change)

    def settle(self, used: Sequence[bool] | None = None) -> None:
        """The step succeeded: what was to be remembered is, except of parameters that no rank `used`."""
        kept, unused = [], set()
        for segment, was_used in zip(self.segments, used or [True] * len(self.segments), strict=True):
            if not was_used:
                unused.add(segment)
                span = slice(segment.start, segment.stop)
                kept += [(kind, span, memory[span].clone()) for kind, memory in self.memory.items()]
        for kind, new in self._next.items():
            self.memory[kind], self._spare[kind] = new, self.memory[kind]
        for change in self._later:
            change()
        for kind, span, values in kept:
            self.memory[kind][span] = values
        for kind, segment, value in self._shares:
            if segment not in unused:
                self.shared.setdefault(kind, {})[segment.name] = value
        self._forget()

    def roll_back(self) -> None:
        """The step is void: the memory stays what it was before."""
        self._spare |= self._next
        self._forget()

    def _forget(self) -> None:
        self._next, self._later, self._shares, self.local, self.peak = {}, [], [], None, None


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which memory adds up what gradients of `dtype` hold."""
    return torch.promote_types(dtype, torch.float32)


class Compressor:
    """How gradients travel. Instances hold settings; what persists per parameter lives in `Context.memory`."""

    carrier: ClassVar[type[AllReduce] | type[AllGather]] = AllGather
    """The collective of the one-round case: AllReduce adds payloads up on the way, AllGather brings everyone's."""

    overlap: bool = True
    """False if no exchange is to start before the step is called for."""

    whole_model: bool = False
    """True if `prepare` needs every gradient of the step before the first exchange: no overlap with backward."""

    in_turn: bool = False
    """True if one bucket's exchange must end before the next one's second round starts."""

    source: Source = "gradient"
    """What travels: the gradient, or the update that the wrapped optimizer makes of the local one, by itself.

    An update is added to the parameters as it arrives, and nothing overlaps with backward. "auto" becomes "update" for
    Adam and torch's other optimizers whose update is made coordinate by coordinate (Adadelta, Adagrad, Adamax, AdamW,
    NAdam, RAdam, RMSprop, Rprop, SparseAdam), as Adam's moments are no use with gradients of which most coordinates are
    missing. Give Adam no first moment then, betas=(0.0, b2): what waits to be sent is momentum enough
    (docs/compressors.md). If a wire fails, the step is lost, but the optimizer's own state, and what waits, have taken
    in its gradient.

    "auto" becomes "gradient" for SGD, where the two differ by a factor of lr, and for all others, of which it is not
    known that their updates add up. Say "update" for one of your own if nothing but its `step()` changes weights, if
    that uses only the gradients and what it keeps of them, and changes nothing that is to be equal on all ranks but the
    weights. This cannot be checked: an optimizer that makes weights from its own state, such as the z of schedule-free
    ones in `eval()`, makes other ones on each rank then. One whose `step()` is known to exchange weights with other
    ranks, such as ZeroRedundancyOptimizer, is refused with "update".
    """

    _decided: Source = "auto"

    @property
    def sends(self) -> Literal["gradient", "update"]:
        """What travels: `source`, or where that is "auto" what `attach` has decided; until then gradients.

        Raises ConfigError for a source that is none of them.
        """
        if self.source not in ("auto", "gradient", "update"):
            raise ConfigError(f'source must be "auto", "gradient" or "update", not {self.source!r}')
        chosen = self._decided if self.source == "auto" else self.source
        return "update" if chosen == "update" else "gradient"

    @property
    def conserves(self) -> bool:
        """Whether nothing is lost: the sum applied and all memory whose kind starts with "residual" add up to the
        gradients."""
        return False

    def __repr__(self) -> str:
        """The settings, alike on all ranks that have the same: they are compared when an optimizer is wrapped."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def kind(self, name: str, param: Tensor) -> Hashable:
        """Parameters of different kinds never share a bucket."""
        return None

    def attach(self, optimizer: Optimizer) -> None:
        """See the wrapped optimizer once, before training; `sends` is decided afterwards.

        Raises ConfigError for an optimizer, or a `source`, that the compressor cannot go with.
        """
        self._doubt_ratio()
        self._decided = "update" if updates_add_up(optimizer) else "gradient"
        sends, name = self.sends, type(optimizer).__name__
        if self.source != "auto":
            return
        if sends == "update":
            log.info("dgcopt: what travels are the updates that %s makes on each rank", name)
            if any("betas" in group and group["betas"][0] for group in optimizer.param_groups):
                log.info("dgcopt: what waits to be sent is momentum enough: betas=(0.0, ...) should do better")
        elif not isinstance(optimizer, SGD | LBFGS):
            log.info(
                "dgcopt: what travels are gradients, as it is not known that updates of %s add up: if they do, and "
                "weights depend on nothing else, give the compressor source='update'",
                name,
            )

    def _doubt_ratio(self) -> None:
        """Say what a ratio of 1 is, where 1% may have been meant."""
        if getattr(self, "ratio", None) == 1:
            log.warning("dgcopt: %s: ratio 1 sends everything; 1%% is 0.01", type(self).__name__)

    def set_steps_per_epoch(self, steps: int) -> None:
        """Tell schedules that count epochs how many optimizer steps one has."""

    def in_place(self, kind: Hashable) -> bool:
        """Whether `exchange` can read gradients of a kind from `Context.local`, so that on a CPU none is copied for it.

        Its `grad` is empty then.
        """
        return False

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        """Change the step's local gradients, all at once, before any is exchanged. Only if `whole_model`."""

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        """Exchange one bucket: yields collectives, returns the gradient averaged (or summed) over ranks.

        `grad` is flat, may be overwritten and returned. Between parameters it is zero: who calls guarantees it, as
        `Bucket.fill` does, and so does who hands on to a compressor inside what another exchange returned
        (`PerTensor.clear_gaps`). The result may hold anything there. All ranks must return the same bits; as a
        SparseSum if they know nearly all of them to be zero.
        """
        payload = self.compress(grad, ctx)
        if self.carrier is AllReduce:
            return self.decompress((yield AllReduce(payload, op=ctx.op)), ctx)
        return self.decompress((yield AllGather(payload)), ctx)

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        """One rank's message."""
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        """The flat gradient, averaged (or summed, see `ctx.op`).

        `payloads` is the reduced message if the carrier is AllReduce, else `[size, ...]`, one row per rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def payload_bytes(self, ctx: Context) -> int | None:
        """Bytes of all messages that this rank hands to collectives in one exchange; None if data decide."""
        return None

    def before_step(self, optimizer: Optimizer) -> Iterable[Tensor] | None:
        """Runs between the exchange and the optimizer's own update.

        Returns parameters whose update it has made itself, over which the optimizer then passes.
        """
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Runs after the optimizer's own update."""
