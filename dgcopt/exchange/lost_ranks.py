"""Losses of ranks (`dgcopt.init(survive=True)`): repeat the step, and keep copies of residuals on other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..collectives import Collective, SendRecv
from ..comm import Comm, Handle
from ..errors import CommError, QuorumLost, VotedOut
from ..flat.memory import is_unsent

__all__ = ["Buddy", "repeat_after_lost_ranks"]

Result = TypeVar("Result")


def repeat_after_lost_ranks(
    act: Callable[[], Result],
    comm: Comm,
    follow: Callable[[], None],
    count_lost: Callable[[float, bool], None],
    admit: Callable[[], None] = lambda: None,
) -> Result | None:
    """Call `act`, which ends in a commit, until the ranks that are left have committed it.

    Returns its result; None if the step was committed although `act` has failed.

    Args:
        act: exchanges, and commits by `Comm.confirm`; a failure changes nothing.
        comm: the wire.
        follow: adopts the current ranks; called before each attempt.
        count_lost: counts the seconds of a failed attempt, and whether it was aborted (`Telemetry.count_lost`).
        admit: admits processes that ask to join, after a failed attempt.
    """
    commits = comm.commits
    while True:
        follow()
        generation, start = comm.generation, time.perf_counter()
        try:
            return act()
        except (VotedOut, QuorumLost):
            raise
        except CommError as error:
            if comm.generation == generation:  # else a confirmation has recovered already
                comm.recover(error)
        count_lost(time.perf_counter() - start, comm.commits == commits)
        if comm.commits > commits:
            return None
        admit()


class Buddy:
    """Copies of other ranks' residuals on one rank (`residuals="buddy"`)."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Tensor]] = {}  # by process and parameter

    def copy(
        self,
        memory: dict[str, dict[str, Tensor]],
        params: Mapping[str, Tensor],
        comm: Comm,
        start: Callable[[Collective, str], Handle],
    ) -> None:
        """Send the unsent part of this rank's memory to the next rank, as bfloat16, and keep that of the rank before.

        Every rank calls it after the same step. A loss meanwhile repeats it among the ranks that are left.

        Args:
            memory: all memory of this rank.
            params: all parameters, in one order on all ranks.
            comm: the wire.
            start: starts a collective with a label.
        """
        counts = [param.numel() for param in params.values()]
        flat = torch.zeros(sum(counts), dtype=torch.float32, device="cpu")
        for (name, _), view in zip(params.items(), flat.split(counts), strict=True):
            for kind, by_name in memory.items():
                if is_unsent(kind) and name in by_name:
                    view += by_name[name].detach().flatten().float().cpu()
        flat = flat.bfloat16()

        def exchange() -> tuple[tuple[str, ...], dict[str, Tensor]]:
            members, here, size = comm.members, comm.rank, comm.size
            if size == 1:
                return members, {}
            sending = SendRecv(flat, to=(here + 1) % size, source=(here - 1) % size)
            return members, {members[here - 1]: comm.wait(start(sending, "copy of the residual"))}

        members, received = comm.complete(exchange)
        # older copies are void; those of ranks lost before stay until they are taken over
        self._held = {name: kept for name, kept in self._held.items() if name not in members}
        for sender, copied in received.items():
            self._held[sender] = dict(zip(params, copied.split(counts), strict=True))

    def take_over(
        self, memory: dict[str, dict[str, Tensor]], members: tuple[str, ...], params: Mapping[str, Tensor]
    ) -> list[str]:
        """Add the copies of ranks that are not in `members` to this rank's residual; return these ranks."""
        lost = [name for name in self._held if name not in members]
        for one in lost:
            residual = memory.setdefault("residual", {})
            for name, part in self._held.pop(one).items():
                mine = residual[name] if name in residual else torch.zeros_like(params[name])
                residual[name] = mine + part.view_as(mine).to(mine)
        return lost
