"""Memory of one bucket from step to step: a transaction, whose changes take effect when all ranks commit the step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import BLOCK, gather
from .buckets import PerTensor, Segment
from .shard import Shard, Sharding

__all__ = ["Absorbed", "Memory", "at_least_float32", "is_unsent"]


class Absorbed(Enum):
    """Progress of an update of memory in place, which a rollback cannot undo."""

    NO = "memory is that of the last commit"
    PARTLY = "some of memory contains this step's gradient"
    WHOLLY = "all of memory contains this step's gradient"


class Memory(Mapping[str, Tensor]):
    """Flat tensors of one bucket's layout by kind, as of the last commit.

    They follow their parameters through checkpoints and new buckets. Kinds that start with "residual" are unsent
    gradient. An exchange asks for the next tensors (`remember`, `advance`) or changes the current ones `on_commit`.

    Args:
        segments: the parameters' spans.
        shared: small tensors of any shape that are the same on all ranks, by kind and parameter name; they persist too.
            Change them through `share`.

    Attributes:
        shards: memory of the coordinates that this rank owns; see `shard`.
        idle: kinds of unsent memory that the last exchange did not use; `add_unsent` adds them to the gradient before
            the next one.
        absorbed: how far memory in place already contains this step's gradient; see `absorbing`.
    """

    def __init__(self, segments: Sequence[Segment], shared: dict[str, dict[str, Tensor]] | None = None) -> None:
        self.segments = segments
        self.shared = {} if shared is None else shared
        self.shards: dict[str, Shard] = {}
        self.idle: Sequence[str] = ()
        self._current: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._unstarted: dict[str, Sequence[Segment]] = {}
        self._end_transaction()

    def _end_transaction(self) -> None:
        self.absorbed = Absorbed.NO
        self._next: dict[str, Tensor] = {}
        self._left: Tensor | None = None  # the next residual, to be copied
        self._later: list[Callable[[], object]] = []
        self._shares: list[tuple[str, Segment, Tensor]] = []
        self._taken: set[str] = set()
        self._added: dict[str, Tensor] = {}
        self._kept: list[tuple[Mapping[str, Tensor | Shard], str, slice, Tensor]] = []
        self._unused: set[Segment] = set()
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    # -- as of the last commit ---------------------------------------------------------------------------------------

    def __getitem__(self, kind: str) -> Tensor:
        return self._current[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        return self.segments[0].param.dtype

    @property
    def device(self) -> torch.device:
        """The parameters'."""
        return self.segments[0].param.device

    @cached_property
    def numel(self) -> int:
        """Length of a flat tensor, gaps included."""
        return -(-self.segments[-1].stop // BLOCK) * BLOCK

    @cached_property
    def tensors(self) -> PerTensor:
        """Statistics of a flat tensor per parameter."""
        return PerTensor(self.segments)

    def put(self, kind: str, flat: Tensor, unstarted: Sequence[Segment] = ()) -> None:
        """Set the current memory of a kind at once. Call it between exchanges, or `on_commit`.

        `unstarted` parameters have had no such memory yet: `hold` gives them their initial one.
        """
        self._current[kind], self._unstarted[kind] = flat, unstarted

    def has_begun(self, kind: str, segment: Segment) -> bool:
        """Return True if a parameter has memory of a kind: False while `hold` has yet to set its initial value."""
        return segment not in self._unstarted.get(kind, ()) or bool(segment.view(self[kind]).any())

    def take(self, kind: str) -> Tensor | None:
        """Remove and return the current memory of a kind at once; None if there is none."""
        return self._current.pop(kind, None)

    # -- within a step -----------------------------------------------------------------------------------------------

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
        held = self._current.get(kind)
        self._taken.add(kind)
        if held is not None and held is self._added.get(kind):
            held = None  # already in the gradient
        wanted = at_least_float32(self.dtype) if dtype is None else dtype
        if held is None:
            held = torch.zeros(self.numel, dtype=wanted, device=self.device)
            self.put(kind, held, self.segments)
        elif held.dtype != wanted:  # loaded from a checkpoint
            held = self._current[kind] = held.to(wanted)
        for segment in self._unstarted.pop(kind, ()):
            value = None if start is None else start(segment)
            if value is not None:
                segment.view(held).copy_(value)
        return held

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

    def remember(self, kind: str, like: Tensor) -> Tensor:
        """Return the next memory of a kind, to change in place; zero at first, float32 if `like` has half precision.

        The kind of unsent gradient is "residual".
        """
        if kind in self._next:
            return self._next[kind]
        old, new = self.advance(kind, dtype=at_least_float32(like.dtype))
        return new.copy_(old)

    def residual(self) -> tuple[Tensor, Tensor]:
        """Return the residual, and an unwritten tensor for its sum with the gradient, to give to `keep_residual`."""
        residual = self.hold("residual")
        ahead = self._spare.get("residual")
        if ahead is None or ahead.dtype != residual.dtype:
            ahead = self._spare["residual"] = torch.empty_like(residual)
        return residual, ahead

    def keep_residual(self, left: Tensor) -> None:
        """Make `left` the next residual. It must not change until the exchange has ended.

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

    def share(self, kind: str, segment: Segment, value: Tensor) -> None:
        """Set `shared[kind]` of a parameter at commit; `value` has the same bits on all ranks."""
        self._shares.append((kind, segment, value))

    def on_commit(self, change: Callable[[], object]) -> None:
        """Run `change`, which changes memory in place, at commit."""
        self._later.append(change)

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Context for adding the gradient to memory in place, allowed once all ranks have voted (`Context.certain`).

        If the step is aborted later, memory keeps the gradient for the next step, and `param.grad` is cleared.
        """
        self.absorbed = Absorbed.PARTLY
        yield
        self.absorbed = Absorbed.WHOLLY

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

    # -- unsent and sharded memory -----------------------------------------------------------------------------------

    def shard(self, kind: str, sharding: Sharding, owner: int) -> Shard:
        """Return the shard of one owner, this rank, of the memory of a kind; zero at first, float32 at least.

        Coordinates that a checkpoint of another world size gave this rank, but that it does not own now, are added to
        the current and the next "residual", which must exist.
        """
        self._taken.add(kind)
        if kind not in self.shards and kind not in self:
            held = torch.zeros(sharding.length, dtype=at_least_float32(self.dtype), device=self.device)
            self.shards[kind] = Shard(sharding, owner, held)
        elif kind not in self.shards:
            self.shards[kind] = Shard.taken_from(self.hold(kind), sharding, owner)
            self.merge_into_residual(kind)
        return self.shards[kind]

    def _whole(self, kind: str) -> Tensor:
        """Remove the memory of a kind, whole or this rank's shard, and return it as a flat tensor."""
        return self._current.pop(kind) if kind in self else self.shards.pop(kind).whole()

    @property
    def _unsent(self) -> list[str]:
        return [kind for kind in (*self, *self.shards) if is_unsent(kind)]

    def merge_into_residual(self, kind: str) -> None:
        """Add the memory of a kind, whole or this rank's shard, to "residual", which must exist, and remove it.

        Both the current and the next residual get it, so a commit and an abort keep it alike.
        """
        whole = self._whole(kind)
        if whole.any():
            for residual in (self["residual"], self._next.get("residual"), self._left):
                if residual is not None:
                    residual.add_(whole)

    def add_unsent(self, grad: Tensor, kinds: Sequence[str] | None = None, weight: float = 1.0) -> None:
        """Add `weight` times unsent memory, of all kinds or some, to a gradient that is sent whole.

        The memory is cleared at commit. An exchange that reads it meanwhile finds zeros.
        """
        for kind in filter(is_unsent, tuple(self)) if kinds is None else kinds:
            held = self._added[kind] = self[kind]
            grad.add_(held, alpha=weight)
            self._taken.add(kind)
            self.on_commit(held.zero_)

    def take_unsent(self) -> Tensor | None:
        """Remove and return the sum of all unsent memory, or None if there is none. Call it between exchanges."""
        held = [self._whole(kind) for kind in self._unsent]
        self.idle = ()
        return torch.stack([each.to(at_least_float32(self.dtype)) for each in held]).sum(0) if held else None

    def keep_unsent(self) -> None:
        """Keep all unsent memory for a later exchange."""
        self._taken.update(self._unsent)

    # -- commit or roll back -----------------------------------------------------------------------------------------

    def prepare(self, used: Sequence[bool] | None = None) -> None:
        """Prepare `commit`: copy the memory of parameters that no rank `used`, which does not change."""
        kept: list[tuple[Mapping[str, Tensor | Shard], str, slice, Tensor]] = []
        unused = set()
        for segment, was_used in zip(self.segments, used or [True] * len(self.segments), strict=True):
            if not was_used:
                unused.add(segment)
                span = slice(segment.start, segment.stop)
                before = self._current | self._added
                kept += [(self._current, kind, span, held[span].clone()) for kind, held in before.items()]
                kept += [(self.shards, kind, span, held[span]) for kind, held in self.shards.items()]
        self._kept, self._unused = kept, unused

    def commit(self) -> None:
        """Make the next memory current, except for parameters that no rank used; see `prepare`.

        Unsent memory that the exchange did not use, such as another compressor's from a checkpoint, is added to
        "residual", or becomes `idle` if the exchange has no residual.
        """
        for kind, new in self._next.items():
            self._current[kind], self._spare[kind] = new, self._current[kind]
        for change in self._later:
            change()
        for memory, kind, span, values in self._kept:
            memory[kind][span] = values
        for kind, segment, value in self._shares:
            if segment not in self._unused:
                self.shared.setdefault(kind, {})[segment.name] = value
        taken, added = self._taken, self._added
        self._end_transaction()
        self._pass_on(taken, added)

    def _pass_on(self, taken: Collection[str], added: Collection[str]) -> None:
        """Keep unsent memory that the exchange has not `taken` for the next one; remove `added` memory that is zero."""
        idle = [kind for kind in self._unsent if kind not in taken]
        for kind in idle:
            if "residual" in taken:
                self.merge_into_residual(kind)
            elif kind in self.shards:
                self._current[kind] = self.shards.pop(kind).whole()
        for kind in (*idle, *added):
            if kind in self and not self[kind].any():
                del self._current[kind]
        self.idle = [kind for kind in idle if kind in self]

    def rollback(self) -> None:
        """Return to the memory of the last commit."""
        for flat, positions, values in self._before:
            flat.index_copy_(0, positions, values)
        self._spare |= self._next
        self._current |= self._added
        self._end_transaction()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of memory that accumulates gradients of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def is_unsent(kind: str) -> bool:
    """Return True if memory of a kind is unsent gradient. Other kinds, such as momenta, are never sent."""
    return kind.startswith("residual")
