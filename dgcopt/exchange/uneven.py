"""Uneven data: ranks that run out of data serve the steps of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..errors.checks import check_flag
from .held import held
from .participation import Participation
from .runner import Job, Runner, serve

__all__ = ["JoinHook", "join"]

SAME_NUMBER = (
    "give all ranks the same number of batches, as dgcopt.data.LoadBalancingDistributedSampler does, and leave join out"
)


class Serving(Protocol):
    """One optimizer's exchange of gradients or weights, which serves the ranks that have data."""

    runner: Runner
    participation: Participation

    def join(self, divides: bool, throws: bool) -> None:
        """Allow ranks to run out of data from now on; see `Participation.begin`."""


@contextmanager
def join(
    *members: Any,
    divide_by: Literal["active", "all"] = "active",
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Let ranks make different numbers of steps; every rank leaves once all have run out of data.

        with dgcopt.join(optimizer):
            for inputs, targets in loader:  # longer on some ranks than on others
                ...

    A rank that is out of data takes part in the others' steps with zero gradients: its residual is still sent, and its
    parameters stay equal. Works on every wire. Other collectives of the loop (a logged loss) are not served, except
    `dgcopt.sync_buffers`: all ranks end with the statistics of the last rank with data.

    Ranks without data step with the learning rate and other group settings of a rank with data. A scheduler that steps
    per batch falls behind on them: before the next epoch load one rank's state
    (`scheduler.load_state_dict(dgcopt.broadcast_object(scheduler.state_dict()))`), or step it once per epoch.

    An optimizer whose weights are averaged (`dgcopt.averaging`) takes part in the others' rounds without local steps;
    all ranks leave after a round that includes every rank's last step.

    Args:
        members: the loop's optimizers, in the order of their steps; also other Joinables of
            `torch.distributed.algorithms.Join` (DistributedDataParallel, user-defined ones) in the loop. Over Horovod
            or MPI a Joinable must come first, and all must share a process group. A ZeroRedundancyOptimizer must be
            inside a DistributedOptimizer.
        divide_by: divide averages by the ranks with data ("active"), which keeps their step size, or by all ranks
            ("all"), the default of torch's Join and DDP.
        enable: False if all ranks are known to have the same number of batches.
        throw_on_early_termination: raise OutOfData on all ranks at the first step or round for which some rank has no
            data; torch's members raise its RuntimeError. An optimizer notices it in the vote of its step, after
            forward: a model that communicates in forward (SyncBatchNorm) waits there for the ranks that have left,
            until torch's own deadline ("Timed out waiting", or NCCL's watchdog). Put such a model
            in DistributedDataParallel with `dgcopt.ddp_hook`, and join that: DDP notices it before each forward. After
            OutOfData weights are those of the last step, but running statistics of batch norm include one more batch on
            ranks with data: call `dgcopt.broadcast_parameters(model.state_dict())` before training continues.

    Raises ConfigError for optimizers that are not distributed, that use Adasum or `dgcopt.init(survive=True)`, and for
    members that cannot be combined; `step(closure)` is refused once a rank has run out of data. After an exception in
    the loop this rank takes part in no further step: the others end at their deadline.
    """
    if not members:
        raise ConfigError("join needs the optimizers that step in the loop: dgcopt.join(optimizer)")
    if divide_by not in ("active", "all"):
        raise ConfigError(f'divide_by must be "active" or "all", not {divide_by!r}')
    check_flag(enable, "enable")
    check_flag(throw_on_early_termination, "throw_on_early_termination")
    throws, others = throw_on_early_termination, [member for member in members if _is_torchs(member)]
    serving = [part for member in members if member not in others for part in _serving(member, throws)]
    if not enable:
        yield
    elif others:
        with _torchs_join(members, others, divide_by == "all", throws):
            yield
    else:
        for part in serving:
            part.join(divide_by == "active", throws)
        yield
        for part in serving:
            part.participation.leave()
        serve([part.runner for part in serving])


def _serving(optimizer: Any, throws: bool) -> Sequence[Serving]:
    """Return the parts that serve an optimizer's steps, none on a single rank. Raises ConfigError if unsupported."""
    parts = held(optimizer)
    if parts.averaging is not None and parts.gradients is not None:
        raise ConfigError(
            f"join does not support an optimizer whose gradients and weights are both averaged, as by warmup_steps of "
            f"{type(parts.averaging.rule).__name__}: remove one of the two, or {SAME_NUMBER}"
        )
    part = parts.averaging or parts.gradients
    if part is None:
        raise ConfigError(
            "join takes optimizers from DistributedOptimizer or an averaging algorithm, and members of torch's Join"
        )
    if part.comm.survives:
        raise ConfigError(f"join does not support dgcopt.init(survive=True): {SAME_NUMBER}")
    serving: Sequence[Serving] = part.serving(throws)
    return serving


# -- members of torch's Join ------------------------------------------------------------------------------------------


def _is_torchs(member: Any) -> bool:
    """Return True for a torch Joinable that is not a wrapped optimizer."""
    if held(member).gradients is not None or not torch.distributed.is_available():
        return False
    return isinstance(member, torch.distributed.algorithms.join.Joinable)


def _torchs_join(members: Sequence[Any], others: Sequence[Any], divide_by_all: bool, throws: bool) -> Any:
    """Return torch's Join with wrapped optimizers as members of the others' process group.

    The first member reports at each iteration that its rank has data.
    """
    if any(held(member).averaging is not None for member in members):
        raise ConfigError(
            "join cannot combine averaged weights with torch's members, which take part in each iteration. Average "
            "gradients, or give all ranks the same number of batches."
        )
    optim = sys.modules.get("torch.distributed.optim")  # importing it would take a second
    if optim is not None and any(isinstance(other, optim.ZeroRedundancyOptimizer) for other in others):
        raise ConfigError(
            "join cannot serve a bare ZeroRedundancyOptimizer: a rank without data would step its shard with the stale "
            "gradients of its own last batch. Wrap it by DistributedOptimizer, without DistributedDataParallel, and "
            "give that to join."
        )
    group = others[0].join_process_group
    theirs = torch.distributed.get_world_size(group)
    comms = {member: steps.comm for member in members if (steps := held(member).gradients) is not None}
    for comm in comms.values():
        if comm.size != theirs:
            raise ConfigError(
                f"join needs members with the same ranks: torch's have {theirs}, an optimizer has {comm.size}"
            )
    on_torch = [member for member, comm in comms.items() if getattr(comm, "process_group", None) == group]
    if members[0] not in on_torch and members[0] not in others:
        raise ConfigError(
            f"over the wire {comms[members[0]].wire}, join needs one of torch's members ({type(others[0]).__name__}) "
            f"first, and the loop must use it first: it reports which ranks have data"
        )
    if not divide_by_all and any(isinstance(m, DistributedDataParallel) for m in members[1:]):
        raise ConfigError(
            "DistributedDataParallel divides by the ranks with data only if it is the first member. Put it first, or "
            "set divide_by='all'."
        )
    joinables: Any = [m if m in others or m in on_torch else _Guest(m, others[0]) for m in members]
    return torch.distributed.algorithms.Join(
        joinables,
        enable=True,
        throw_on_early_termination=throws,
        divide_by_initial_world_size=divide_by_all,
    )


class _Guest:
    """An optimizer over another wire, presented to torch's Join as a member of its process group."""

    def __init__(self, optimizer: Any, host: Any) -> None:
        self.join_hook = optimizer.join_hook
        self.join_device = host.join_device
        self.join_process_group = host.join_process_group


class JoinHook:
    """One optimizer's part in `torch.distributed.algorithms.Join`; see torch's `JoinHook`.

    Args:
        runner: the jobs of the optimizer.
        serve_step: makes the job of a step without data.
        participation: which ranks have data.
        divide_by_all: True if averages divide by all ranks.
    """

    def __init__(
        self, runner: Runner, serve_step: Callable[[], Job], participation: Participation, divide_by_all: bool
    ) -> None:
        self._runner = runner
        self._serve_step = serve_step
        self._participation = participation
        participation.begin(not divide_by_all)

    def main_hook(self) -> None:
        """Take part in a step of the ranks that have data."""
        self._runner.add(self._serve_step())
        self._runner.finish()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Note that all ranks have run out of data."""
        self._participation.all_here()
