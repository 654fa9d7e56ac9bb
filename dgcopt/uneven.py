"""Uneven data: ranks that run out of it go on serving those that have more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from .averaging import AsyncAverage, Rounds
from .checks import check_flag
from .compressors import Adasum
from .errors import ConfigError
from .exchange.runner import serve
from .gradients.engine import Engine
from .gradients.optimizer import Distributed

__all__ = ["join"]


@contextmanager
def join(
    *members: Any,
    divide_by: Literal["active", "all"] = "active",
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Let ranks take different numbers of steps; every rank leaves once all have run out of data.

        with dgcopt.join(optimizer):
            for inputs, targets in loader:  # longer on some ranks than on others
                ...

    A rank whose loop has ended takes part in the others' steps without gradients of its own: what it held back is
    still sent, and its parameters follow. Works on every wire; what else the loop sends (a logged loss) it must not
    wait for, but `dgcopt.sync_buffers` goes on: all end with the statistics of a rank that came last.

    Ranks without data step with the learning rate, and other numbers of parameter groups, of one that has some. But a
    scheduler that steps with each batch has fallen behind there when all leave: before the next epoch take one rank's
    (`scheduler.load_state_dict(dgcopt.broadcast_object(scheduler.state_dict()))`), or step it once per epoch.

    An optimizer whose weights are averaged (`dgcopt.averaging`) takes part in the others' exchanges without steps of
    its own, and all ranks leave after an exchange to which each has brought its last step.

    Args:
        members: optimizers that step in the loop, in the order in which they step. Also whatever else
            `torch.distributed.algorithms.Join` takes (DistributedDataParallel, or what you have written for it), where
            the loop uses it; over Horovod or MPI one of those must come first, and all of one process group. A
            ZeroRedundancyOptimizer must be the one that DistributedOptimizer was given.
        divide_by: averages divide by the ranks that still have data ("active"), so that each of their steps is as long
            as ever, or by all of them ("all"), which is what torch's Join and DDP do unless told otherwise.
        enable: False if all ranks are known to have as much data, and nobody is to be served.
        throw_on_early_termination: raise OutOfData, on all ranks, at the first step or exchange of weights that some
            have no data for, in place of serving the others; torch's members raise its RuntimeError.

    Raises ConfigError for optimizers that are not distributed or use Adasum, and for members that do not go together;
    `step(closure)` is refused once a rank has run out of data. After an exception in the loop nobody is served: the
    others end at their deadline.
    """
    if not members:
        raise ConfigError("join needs the optimizers that step in the loop: dgcopt.join(optimizer)")
    if divide_by not in ("active", "all"):
        raise ConfigError(f'divide_by must be "active" or "all", not {divide_by!r}')
    check_flag(enable, "enable")
    check_flag(throw_on_early_termination, "throw_on_early_termination")
    throws, others = throw_on_early_termination, [member for member in members if _is_torchs(member)]
    serving = [part for member in members if member not in others for part in _part_of(member, throws)]
    if not enable:
        yield
    elif others:
        with _torchs_join(members, others, divide_by == "all", throws):
            yield
    else:
        for part in serving:
            if isinstance(part, Rounds):
                part.join()
            part.attendance.begin(divide_by == "active", throws)
        yield
        for part in serving:
            part.attendance.here = False
        serve([part.runner for part in serving])


def _part_of(optimizer: Any, throws: bool) -> Sequence[Engine | Rounds]:
    """What serves an optimizer's steps, if it has other ranks. Raises ConfigError if nothing can."""
    averaging: Rounds | None = getattr(optimizer, "averaging", None)
    if averaging is not None:
        if isinstance(optimizer, Distributed):
            raise ConfigError("join does not work where both gradients and weights are averaged")
        if throws and isinstance(averaging.rule, AsyncAverage):
            raise ConfigError("throw_on_early_termination does not go with AsyncAverage, for which nobody waits")
        return [averaging]
    if not isinstance(optimizer, Distributed):
        raise ConfigError(
            "join takes optimizers that DistributedOptimizer, or an averaging algorithm, returned, and what torch's "
            "Join takes"
        )
    if any(isinstance(part, Adasum) for part in optimizer.compressor.parts()):
        raise ConfigError("join does not work with Adasum, for which a rank without data has no neutral update")
    return [optimizer.engine] if optimizer.engine is not None else []


# -- with what torch's Join takes ------------------------------------------------------------------------------------


def _is_torchs(member: Any) -> bool:
    """Whether it is one of torch's Joinables, and none of our optimizers."""
    if isinstance(member, Distributed) or not torch.distributed.is_available():
        return False
    return isinstance(member, torch.distributed.algorithms.join.Joinable)


def _torchs_join(members: Sequence[Any], others: Sequence[Any], divide_by_all: bool, throws: bool) -> Any:
    """torch's Join, in which our optimizers take part as members of the others' process group.

    The first member says at each iteration that its rank has data, so that all know whose parts are to be played.
    """
    if any(getattr(member, "averaging", None) is not None for member in members):
        raise ConfigError(
            "join cannot serve averaged weights together with torch's members, which take part in each iteration: "
            "average gradients, or give all ranks as much data"
        )
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which torch.distributed does not import

    if any(isinstance(other, ZeroRedundancyOptimizer) for other in others):
        raise ConfigError(
            "join cannot serve a ZeroRedundancyOptimizer by itself: a rank that has run out of data would step its "
            "part of the parameters by the gradients of its own last batch, as DistributedDataParallel leaves it no "
            "others. Give it to DistributedOptimizer, without DistributedDataParallel, and that to join"
        )
    group = others[0].join_process_group
    theirs = torch.distributed.get_world_size(group)
    for member in members:
        if isinstance(member, Distributed) and member.comm.size != theirs:
            raise ConfigError(
                f"join needs members of the same ranks: torch's have {theirs}, and an optimizer {member.comm.size}"
            )
    on_torch = [member for member in members if getattr(getattr(member, "comm", None), "process_group", None) == group]
    if members[0] not in on_torch and members[0] not in others:
        raise ConfigError(
            f"over the wire {members[0].comm.wire}, join needs one of torch's members ({type(others[0]).__name__}) "
            f"first, and the loop must use it first: it says that a rank has data"
        )
    if not divide_by_all and any(isinstance(m, DistributedDataParallel) for m in members[1:]):
        raise ConfigError(
            "DistributedDataParallel divides by the ranks that have data only where it is the first member: put it "
            "first, or say divide_by='all'"
        )
    joinables: Any = [m if m in others or m in on_torch else _Guest(m, others[0]) for m in members]
    return torch.distributed.algorithms.Join(
        joinables,
        enable=True,
        throw_on_early_termination=throws,
        divide_by_initial_world_size=divide_by_all,
    )


class _Guest:
    """Our optimizer over another wire, to torch's Join a member of its process group."""

    def __init__(self, optimizer: Any, host: Any) -> None:
        self.join_hook = optimizer.join_hook
        self.join_device = host.join_device
        self.join_process_group = host.join_process_group
