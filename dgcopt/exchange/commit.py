"""The end of a step on one rank, shared by all exchanges of gradients: prepare, then commit as one act, or abort.

    prepare   inspect the results, and do all that may fail or allocate; nothing has changed if it fails
    commit    let memory and gradients take their new values
    abort     roll memory back; gradients are not applied

Ranks that have received the same bytes get the same result from `inspect`, so all commit or all abort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..coding import Checks, read_checks
from ..collectives import everyone
from ..comm import Comm
from ..compressors import Context
from ..errors import InterruptedStep
from ..flat.gradient import GradientBucket, SparseSum, values_of
from ..flat.memory import Absorbed
from ..kernels import peaks
from .scheduler import PendingExchange
from .telemetry import Telemetry

__all__ = [
    "CommitMarker",
    "FinishedExchange",
    "NotFinite",
    "Write",
    "commit_gradients",
    "commit_memory",
    "inspect",
    "interrupted",
    "prepare_gradients",
    "prepare_memory",
    "rollback_memory",
]

Write = Callable[[], None]
"""Function that assigns prepared gradients."""


class CommitMarker:
    """Marker of a commit in progress on one rank: memory, gradients and weights must belong to the same step.

    They take their new values between `begin` and `end`. After an interruption in between, `check` raises. It uses no
    exception handler, so it misses no exception.
    """

    def __init__(self) -> None:
        self._under_way = ""

    def begin(self, changes: str) -> None:
        """Note that `changes` are about to take their new values."""
        self._under_way = changes

    def end(self) -> None:
        """Note that everything has its new value, or a checkpoint's."""
        self._under_way = ""

    def check(self, rank: int) -> None:
        """Raise InterruptedStep if the last step was interrupted between `begin` and `end`."""
        if self._under_way:
            raise interrupted(rank, self._under_way)


def interrupted(rank: int, changes: str) -> InterruptedStep:
    """Return the error of a rank that has made only some of the `changes` of its last step."""
    return InterruptedStep(
        f"rank {rank}: an exception interrupted the last step while {changes} took their new values, so that this rank "
        f"is between two steps. Restore all ranks from a checkpoint (load_state_dict, or dgcopt.checkpoint.load)."
    )


@dataclass(frozen=True)
class FinishedExchange:
    """One finished exchange, and the gradient for its step.

    Attributes:
        pending: the exchange.
        context: its memory; None if it has none.
        used: for each parameter, True if any rank has used it; None if all have.
        prepare: returns the assignment of a result to the gradients.
        numel: elements of the gradient.
    """

    pending: PendingExchange[Any]
    context: Context | None
    used: Sequence[bool] | None
    prepare: Callable[[Tensor | SparseSum], Write]
    numel: int

    def with_committed_memory(self) -> FinishedExchange:
        """Return the exchange with only its gradient left to commit."""
        return replace(self, context=None)


@dataclass(frozen=True)
class NotFinite:
    """NaN or Inf in the results of the exchange `label`, with the sending `ranks`; none if unknown."""

    label: str
    ranks: Sequence[int]

    def __str__(self) -> str:
        return self.label + (f" from rank(s) {', '.join(map(str, self.ranks))}" if self.ranks else "")


def inspect(finished: Sequence[FinishedExchange], comm: Comm, sums: bool = False) -> list[NotFinite]:
    """Return the exchanges with NaN or Inf in their results, at a cost proportional to the messages.

    Checks sums of a few coordinates, and tensors given to `Checks.check_finite`; a dense sum that an allreduce has made
    only with `sums`, as that takes one more pass: `dgcopt.init(checksums=True)` verifies it otherwise.

    Raises PayloadError for a check of a message that fails, and for a position that is in no parameter.
    """
    checks, finite = Checks(), list[int]()
    for one in finished:
        if isinstance(one.pending.result, SparseSum) and one.context is not None:
            _check_positions(one.pending.result, one.context, one.pending.label, checks)
    checked = [_to_check(one, sums) for one in finished]
    for right in _finite_flags(tensor for found in checked for tensor in found):
        checks.when_read(right, finite.append)
    pending = any(one.context is not None and one.context.checks.are_pending for one in finished)
    if pending or any(checked):
        comm.finish_on_device()
    # all at once, as each read waits for the device
    read_checks([*(one.context.checks for one in finished if one.context is not None), checks])
    if all(finite) and not any(map(_refused, finished)):
        return []
    return [
        NotFinite(one.pending.label, _senders(one))
        for one, found in zip(finished, checked, strict=True)
        if _refused(one) or not _are_finite(found)
    ]


def prepare_memory(finished: Sequence[FinishedExchange]) -> None:
    """Do everything that may fail or allocate, before memory takes its new values."""
    for one in finished:
        if one.context is not None:
            one.context.memory.prepare(one.used)


def prepare_gradients(finished: Sequence[FinishedExchange]) -> list[Write]:
    """Do everything that may fail or allocate, before gradients take their new values; return the assignments."""
    writes = []
    for one in finished:
        assert one.pending.result is not None
        writes.append(one.prepare(one.pending.result))
    return writes


def commit_memory(finished: Sequence[FinishedExchange], telemetry: Telemetry) -> None:
    """Give memory its new values, and add the tallies of exchanges to telemetry."""
    for one in finished:
        if one.context is not None:
            one.context.commit()
            telemetry.count(one.context.tally)
            one.context.tally.clear()


def rollback_memory(contexts: Iterable[tuple[GradientBucket, Context]], marker: CommitMarker) -> None:
    """Return memory to the last commit, and clear gradients that it has already absorbed."""
    for bucket, context in contexts:
        if context.memory.absorbed is Absorbed.WHOLLY:
            bucket.clear_gradients()
        elif context.memory.absorbed is Absorbed.PARTLY:
            marker.begin("memory")
        context.rollback()


def commit_gradients(writes: Sequence[Write]) -> None:
    """Give gradients their new values."""
    for write in writes:
        write()


def _check_positions(result: SparseSum, context: Context, label: str, checks: Checks) -> None:
    def problem() -> str:
        outside = [bool(context.tensors.outside(positions)) for positions, _ in result.messages]
        ranks = everyone(context.rank, context.size)
        whose = f"the message from rank {ranks[outside.index(True)]}" if len(outside) == context.size else "a message"
        return (
            f"rank {context.rank}: {whose} names a position of {label} that is in no parameter: it was damaged on "
            f"the way, or that rank runs another model or version"
        )

    arrived = [positions for positions, _ in result.whole if len(positions)]
    if arrived:  # one check for all: on a GPU every operation is a launch
        together = arrived[0] if len(arrived) == 1 else torch.cat(arrived)
        checks.expect(~context.tensors.outside(together), problem)


def _to_check(one: FinishedExchange, sums: bool) -> list[Tensor]:
    result, found = one.pending.result, [] if one.context is None else [*one.context.checks.to_check]
    if isinstance(result, SparseSum):
        found += [values for _, values in result.whole]
    elif result is not None and (sums or result.is_sparse):
        if one.context is not None and not result.is_sparse:
            one.context.tensors.clear_gaps(result)  # gaps may differ between ranks
        found.append(values_of(result))
    return found


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(map(bool, _finite_flags(tensors)))


def _finite_flags(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return an unread flag per device and dtype: True if all its tensors are finite."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [peaks(some).isfinite().all() for some in alike.values()]


def _refused(one: FinishedExchange) -> bool:
    return one.context is not None and bool(one.context.checks.refused)


def _senders(one: FinishedExchange) -> list[int]:
    """Return the ranks with NaN or Inf in their messages, if each message has one sender."""
    result, context = one.pending.result, one.context
    if context is None:
        return []
    messages: list[Iterable[Tensor]] = [*context.checks.by_sender]
    if isinstance(result, SparseSum) and len(result.messages) == context.size:
        messages.append(values for _, values in result.messages)
    found = {
        rank
        for rows in messages
        for rank, row in zip(everyone(context.rank, context.size), rows, strict=False)
        if not _are_finite([row])
    }
    return sorted(context.checks.refused | found)
