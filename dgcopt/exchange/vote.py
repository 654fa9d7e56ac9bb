"""The vote of a step: all ranks learn the state of the others before any uses the results of an exchange.

Buckets leave during backward, before a rank knows the state of the others. Before any result is used, all ranks vote by
one allreduce of 44 bytes at any world size: are all gradients finite and unchanged since they were sent, and do all
ranks have data, the same step, parameters and settings? Only if some rank differs do they gather all ballots, 16 bytes
each, so that an error can name the rank. Votes have a process group of their own and do not wait for buckets.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, Collective
from ..comm import Comm
from ..errors import MismatchError

__all__ = [
    "Ballot",
    "Touch",
    "Verdict",
    "checksum",
    "fingerprint",
    "in_whole_replica",
    "plain",
    "used_anywhere",
    "vote",
]

_PLACE = struct.Struct("<IIIB")
_FORMAT = struct.Struct("<BBHIII")
_FLAGS = ("active", "finite", "stale", "prepared", "complete", "final", "by_active", "here")
_APART = 2  # replaces the flag for stale gradients, which the details report too


class Touch(IntEnum):
    """Detector of changes to gradients by code outside autograd and the exchange, such as clipping."""

    UNKNOWN = 0
    KEPT = 1
    CHANGED = 2


@dataclass
class Ballot:
    """One rank's part in the vote on a step.

    Attributes:
        active: True if the rank has data; a rank without data still takes part in the others' steps.
        finite: it has seen no NaN or Inf in its gradients.
        step: the step it is at.
        trained: checksum of which parameters are trained; see `checksum`.
        launched: how many buckets it has sent.
        stale: gradients have changed since they were sent.
        prepared: it has laid out its buckets.
        complete: every trained parameter has a gradient.
        final: the step will use these gradients; a preliminary vote only asks if they are finite.
        by_active: averages are to divide by the ranks that have data; asked of those that have none.
        here: it has not run out of data.
        settings: checksum of the optimizer's settings; see `GroupSettings`. Compared among active ranks only.
        own: whether its own gradients were changed between backward and the exchange.
        averaged: whether averaged gradients were changed between the exchange and its last step.
        used: fingerprint of which parameters have a gradient; see `fingerprint`. Not among the details.
    """

    active: bool
    finite: bool
    step: int
    trained: int
    launched: int
    stale: bool = False
    prepared: bool = True
    complete: bool = True
    final: bool = True
    by_active: bool = False
    here: bool = True
    settings: int = 0
    own: Touch = Touch.UNKNOWN
    averaged: Touch = Touch.UNKNOWN
    used: int = 0

    def summary(self) -> Tensor:
        """Return the verdict in words, for an allreduce of maxima: int32 `[11]`.

        A number that must be equal on all ranks comes with its complement: the maximum of complements is the
        complement of the minimum.
        """
        changed = (self.own is Touch.CHANGED) + 2 * (self.averaged is Touch.CHANGED)
        where = zlib.crc32(_PLACE.pack(self.step & 0xFFFFFFFF, self.trained, self.settings, changed))
        equal = [_signed(word) for word in (where, self.used, self.used >> 32)]
        apart = not self.active or not self.finite or not self.here or self.by_active
        flags = (_APART if apart else self.stale, not self.prepared, not self.complete, not self.final)
        return torch.tensor([*equal, *(~word for word in equal), self.launched, *flags], dtype=torch.int32)

    def pack(self) -> Tensor:
        """Return the ballot as bytes, uint8 of a fixed length."""
        bits = sum(getattr(self, flag) << place for place, flag in enumerate(_FLAGS))
        touched = self.own + 4 * self.averaged
        data = _FORMAT.pack(bits, touched, self.launched, self.step & 0xFFFFFFFF, self.trained, self.settings)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def unpack(row: Tensor) -> Ballot:
        """Return the ballot that `pack` has written."""
        bits, touched, launched, step, trained, settings = _FORMAT.unpack(bytes(row.tolist()))
        flags = dict(zip(_FLAGS, (bool(bits >> place & 1) for place in range(8)), strict=True))
        own, averaged = (Touch(min(bits, Touch.CHANGED)) for bits in (touched & 3, touched >> 2))
        where = {"step": step, "trained": trained, "launched": launched, "settings": settings}
        return Ballot(**where, **flags, own=own, averaged=averaged)


@dataclass
class Verdict:
    """The conclusion of all ranks from their ballots, the same on each.

    Attributes:
        active_ranks: number of ranks that have something to contribute.
        absent: the ranks that have run out of data.
        void: ranks whose gradients are not finite; if there are any, no rank takes the step.
        stale: True if launched exchanges must be cancelled and launched again.
        prepared: True if all ranks have laid out their buckets.
        complete: True if no rank with data misses a gradient.
        used_alike: True if all ranks are known to have gradients of the same parameters.
        final: True if this was the last vote on the step, unless it is void.
        alike: True if all ranks train the same parameters.
        same_settings: True if all ranks with data have the same settings.
        own_changed: ranks whose own gradients were changed, if those of others were kept.
        averaged_changed: ranks on which averaged gradients were changed, if others have kept them.
        launched: the largest number of buckets that any rank has launched.
        by_active: True if averages divide by the ranks that have data.
    """

    active_ranks: int
    absent: list[int]
    void: list[int]
    stale: bool
    prepared: bool
    complete: bool
    used_alike: bool
    final: bool
    alike: bool
    same_settings: bool
    own_changed: list[int]
    averaged_changed: list[int]
    launched: int
    by_active: bool

    @property
    def is_taken(self) -> bool:
        """True if the ranks take the step: some have data, and all gradients are finite."""
        return self.active_ranks > 0 and not self.void


def plain(value: Any) -> str:
    """Return a setting in words that are the same on all ranks: without memory addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def checksum(names: Iterable[str]) -> int:
    """Return a checksum of parameter names in order: equal on ranks that train the same parameters."""
    return zlib.crc32("\n".join(names).encode())


def fingerprint(used: Sequence[bool]) -> int:
    """Return 64 bits that differ if other parameters have a gradient, except with a chance of one in 2^64."""
    return int.from_bytes(hashlib.blake2b(bytes(used), digest_size=8).digest(), "little")


def vote(ballot: Ballot, ranks: Sequence[int], label: str) -> Generator[Collective, Tensor, Verdict]:
    """Cast this rank's ballot among all `ranks`, and return their verdict.

    Raises MismatchError, on all, if they are not at the same step.
    """
    maxima = yield AllReduce(ballot.summary(), op="max", group="control", label=label)
    words = maxima.tolist()
    same_place, *same_used = (high == ~low for high, low in zip(words[:3], words[3:6], strict=True))
    launched, stale, unprepared, incomplete, preliminary = words[6:]
    if same_place and stale != _APART:
        return Verdict(
            active_ranks=len(ranks),
            absent=[],
            void=[],
            stale=bool(stale),
            prepared=not unprepared,
            complete=not incomplete,
            used_alike=all(same_used),
            final=not preliminary,
            alike=True,
            same_settings=True,
            own_changed=[],
            averaged_changed=[],
            launched=launched,
            by_active=False,
        )
    rows = yield AllGather(ballot.pack(), group="control", label=f"{label} in detail")
    return _verdict_on(dict(zip(ranks, map(Ballot.unpack, rows), strict=True)))


def _verdict_on(by_rank: dict[int, Ballot]) -> Verdict:
    ballots = by_rank.values()
    steps = {ballot.step for ballot in ballots}
    if len(steps) > 1:
        listed = ", ".join(f"rank {rank} is at step {ballot.step}" for rank, ballot in [*by_rank.items()][:16])
        raise MismatchError(
            f"ranks are not at the same step: {listed}. Load the same checkpoint on every rank, and call step() "
            f"equally often."
        )
    return Verdict(
        active_ranks=sum(ballot.active for ballot in ballots),
        absent=[rank for rank, ballot in by_rank.items() if not ballot.here],
        void=[rank for rank, ballot in by_rank.items() if not ballot.finite],
        stale=any(ballot.stale for ballot in ballots),
        prepared=all(ballot.prepared for ballot in ballots),
        complete=all(ballot.complete for ballot in ballots if ballot.active),
        used_alike=False,
        final=all(ballot.final for ballot in ballots),
        alike=len({ballot.trained for ballot in ballots}) == 1,
        same_settings=len({ballot.settings for ballot in ballots if ballot.active}) <= 1,
        own_changed=_changed({rank: ballot.own for rank, ballot in by_rank.items() if ballot.active}),
        averaged_changed=_changed({rank: ballot.averaged for rank, ballot in by_rank.items() if ballot.active}),
        launched=max(ballot.launched for ballot in ballots),
        by_active=any(ballot.by_active for ballot in ballots),
    )


def _changed(touches: Mapping[int, Touch]) -> list[int]:
    """Return the ranks that have changed gradients, if other ranks have kept theirs."""
    have_others_kept = Touch.KEPT in touches.values()
    return [rank for rank, touch in touches.items() if touch is Touch.CHANGED and have_others_kept]


def _signed(word: int) -> int:
    """Return the lowest 32 bits as an int32."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def in_whole_replica(
    is_fine: bool, comm: Comm, label: str, ballot: Ballot | None = None
) -> Generator[Collective, Tensor, bool]:
    """Return True if `is_fine` on all ranks that hold shards of this rank's replica; asks nobody without shards.

    A vote among the ranks of one shard then includes the findings of every rank of every replica. Raises MismatchError,
    on all ranks of the replica, if the `ballot` of some is at another step or has other settings of parameter groups.
    """
    if comm.size_of("replica") == 1:
        return is_fine
    words = [int(not is_fine)]
    if ballot is not None:  # 8 bits, others at each step: a difference that they miss in one is found in the next
        place = zlib.crc32(f"{ballot.step} {ballot.settings}".encode()) & 255
        words += [place, 255 - place] if ballot.here else [0, 0]
    told = torch.tensor(words, dtype=torch.uint8)
    spoiled, *equal = (yield AllReduce(told, op="max", group="replica", label=label)).tolist()
    if sum(equal) > 255:
        raise MismatchError(
            f"rank {comm.rank}: ranks {[*comm.ranks('replica')]} hold shards of one replica of the model, and are at "
            f"different steps or differ in the settings of parameter groups, such as the learning rate. Give all "
            f"ranks the same settings and state, and call step() equally often."
        )
    return not spoiled


def used_anywhere(used: list[bool], label: str) -> Generator[Collective, Tensor, list[bool]]:
    """Return for each parameter True if any rank has a gradient of it; gathers a bit each."""
    padded = torch.zeros(-(-len(used) // 8) * 8, dtype=torch.uint8)
    padded[: len(used)] = torch.tensor(used, dtype=torch.uint8)
    weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8)
    packed = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    rows = yield AllGather(packed, group="control", label=label)
    bits = (rows.unsqueeze(-1) & weights).ne(0).any(0)
    return bits.flatten()[: len(used)].tolist()
