"""The part of `DistributedOptimizer` in one optimizer: its steps, its parameters, and the wire, which may change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ..comm import Comm, current_comm
from ..compressors import Compressor
from ..errors import ConfigError
from ..exchange.agreement import compare
from ..exchange.held import held
from ..exchange.late_warning import LateWarning
from ..exchange.lost_ranks import Buddy, repeat_after_lost_ranks
from ..exchange.parameters import check_trainable, names_of_new, number
from ..exchange.trace import Trace
from ..exchange.untraced import untraced
from ..flat.local_shard import LocalShard, local_shards
from ..flat.optimizer_state import THROUGH_TORCH
from .engine import Engine
from .replicas import check_shards, shard_of
from .settings import Settings
from .stepping import Stepping, after_step, before_step, stepping_of

__all__ = ["Synchronised", "steps_of", "synchronised"]

log = logging.getLogger("dgcopt")

Of = TypeVar("Of")


class Synchronised(Stepping):
    """The state of one wrapped optimizer: its steps, the wire, and the names of its parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[Tensor, str],
        given: dict[Tensor, str],
        compressor: Compressor,
        settings: Settings,
    ) -> None:
        super().__init__(optimizer, names, compressor)
        self.settings = settings
        self.formerly: set[tuple[int, int]] = set()
        """Previous rank and world size of this process, before Horovod was restarted."""
        self.late_warning = LateWarning(optimizer, THROUGH_TORCH)
        self.has_run_hooks = False
        """False after an optimizer of another package has saved or loaded state without torch's hooks."""
        self._given_names = given
        self._is_hooked = False
        self._generation = 0
        self._is_part_of_round = False
        self._buddy = Buddy()
        self._trace: Trace | None = None
        self._place: int | None = None
        """Its number among the optimizers of the wire, in wrapping order."""

    @property
    def is_sharded(self) -> bool:
        """True if the optimizer steps DTensors, whose local shards are exchanged."""
        return any(isinstance(param, LocalShard) for param in self.names)

    def shard(self) -> dict[str, Any] | None:
        """Return which shards this rank holds, as a checkpoint records it; None where parameters are whole."""
        return shard_of(self.names, self.comm) if self.is_sharded else None

    def added(self, names: Sequence[str] | None) -> None:
        """Take in the parameters of a group that the optimizer was given; raises ConfigError if that cannot be."""
        self._take_in(self._named(self.optimizer.param_groups[-1]["params"], names))

    def take_in_new(self) -> None:
        new = names_of_new(self.optimizer, self.names, self._given_names, self.comm.rank)
        if new:
            self._take_in(new)

    def _take_in(self, added: dict[Tensor, str]) -> None:
        """Exchange new parameters from now on; raises ConfigError if that cannot be."""
        if self.is_sharded:
            check_shards(added, self.comm)
        check_trainable({**self.names, **added}, may_be_sharded=self.is_sharded)
        added = local_shards(added)
        self.compressor.see_parameters({**self.names, **added})
        self.names.update(added)
        if self.engine is not None:
            self.watch_parameters()

    def _named(self, params: Sequence[Tensor], names: Sequence[str] | None) -> dict[Tensor, str]:
        """Return the names of the last group's parameters."""
        group = len(self.optimizer.param_groups) - 1
        if names is None:
            names = [self._given_names.get(param, number(group, place)) for place, param in enumerate(params)]
        elif isinstance(names, str) or len(names) != len(params):
            raise ConfigError(f"the group has {len(params)} parameter(s), and names are {names!r}: give one for each")
        named = {param: self._given_names.get(param, name) for param, name in zip(params, names, strict=True)}
        taken = sorted({*self.names.values()}.intersection(named.values()))
        if taken or len({*named.values()}) < len(named):
            raise ConfigError(
                f"parameter names must be unique, because memory is kept by name: {[*named.values()]}; the optimizer "
                f"already has {taken}. Give add_param_group other names"
            )
        return named

    # -- joining a wire ----------------------------------------------------------------------------------------------

    def rejoin(self, comm: Comm | None = None) -> None:
        """Continue over another wire, after ranks were lost or have joined (`dgcopt.shutdown()`, `dgcopt.init()`).

        Keeps the memory of this rank; an unfinished step is lost. All ranks of `comm` must call it.
        """
        if self.is_sharded:
            raise ConfigError(
                "an optimizer of sharded parameters cannot rejoin, as other ranks would hold other shards: restart all "
                "ranks from a checkpoint"
            )
        before, self.engine = self.engine, None
        self.join(current_comm(comm))
        if before is not None:
            state = before.state()
            if lost := self._buddy.take_over(state["memory"], self.comm.members, self._by_name):
                log.warning("dgcopt: rank %d adds the copied residual of %s to its own", self.comm.rank, lost)
            self.restore(state)
            if self.engine is not None:
                self.engine.runner.scheduler.count_in(before.telemetry)

    def keep_up(self) -> None:
        """Rejoin if `hvd.elastic.run` has restarted Horovod, so that the ranks of this optimizer no longer exist.

        Raises ConfigError if it cannot rejoin; unlike HorovodInternalError, that is not retried.
        """
        if not self.comm.is_void():
            return
        left = self.comm
        if left.is_part or held(self.optimizer).averaging is not None:
            reason = "exchanges among a subset of the ranks" if left.is_part else "averages weights too"
            raise ConfigError(
                f"Horovod was restarted, and this optimizer cannot rejoin by itself: it {reason}. Use "
                f"dgcopt.elastic.State, for optimizers of all ranks, in place of hvd.elastic.TorchState."
            )
        if self.engine is not None:
            self.engine.abort()
        self.rejoin()
        self.formerly.add((left.rank, left.size))
        log.warning(
            "dgcopt: Horovod was restarted, and this optimizer has rejoined: it was rank %d of %d, and is rank %s "
            "of %d. It keeps its residual (norm %.3g); new ranks start with none. Residuals of lost ranks are lost; "
            "dgcopt.elastic.State would have redistributed them",
            *(
                left.rank,
                left.size,
                self.comm.rank,
                self.comm.size,
                self.engine.store.residual_norm() if self.engine is not None else 0.0,
            ),
        )

    def join(self, comm: Comm) -> None:
        """Exchange over a wire from now on."""
        self.comm, self._generation = comm, comm.generation
        self.begin_anew()
        if comm.size > 1 or comm.survives:
            self._connect()
        if self._place is None and self.engine is not None:
            self._place = self.engine.runner.scheduler.number

    def write_trace(self, trace: Trace | None) -> None:
        """Write collectives to a trace from now on, over later wires too; None ends it."""
        self._trace = trace
        if self.engine is not None:
            self.engine.runner.scheduler.write_trace(trace)

    # -- where ranks survive -----------------------------------------------------------------------------------------

    def follow_ranks(self) -> None:
        """Rejoin as `keep_up` does; if ranks survive and no step is in progress, also admit new ones."""
        self.keep_up()
        if self.comm.survives and not (self.engine is not None and self.engine.in_flight):
            self._admit()
            self._follow()

    def exchange_again(self, act: Callable[[Engine], Of]) -> Of | None:
        def attempt() -> Of:
            assert self.engine is not None
            return act(self.engine)

        if self._is_part_of_round:
            self._follow()
            return attempt()
        return repeat_after_lost_ranks(attempt, self.comm, self._follow, self._count_lost, self._admit)

    def leave_lost_ranks_to_caller(self) -> None:
        """Let an exchange fail if a rank is lost: its caller repeats the larger step that it is part of."""
        self._is_part_of_round = True

    def _count_lost(self, seconds: float, aborted: bool) -> None:
        if self.engine is not None:
            self.engine.telemetry.count_lost(seconds, aborted)

    def _admit(self) -> None:
        """Admit new processes before the first step of the training loop's optimizers."""
        if self._place == 0:
            self.comm.begin_step()

    def _follow(self) -> None:
        """Exchange among the current ranks if they have changed; gradients wait in `param.grad`."""
        if self._generation != self.comm.generation:
            if self.engine is not None:
                self.engine.abort()
            self.rejoin(self.comm)

    def _connect(self) -> None:
        """Begin to exchange; in one process only if unsent memory of other ranks has to be added."""
        assert self.engine is None
        self.engine = Engine(self.wrapped, self.comm, self.settings)
        self.engine.runner.scheduler.write_trace(self._trace)
        if self.comm.waits_at_start:  # otherwise done at the first step
            self.comm.drive(compare(self.wrapped.describe(self.settings), self.comm.rank, "parameters and settings"))
        if not self._is_hooked:
            self._is_hooked = True
            self.optimizer.register_step_pre_hook(untraced(before_step))
            self.optimizer.register_step_post_hook(untraced(after_step))
        self.watch_parameters()

    def copy_residual(self) -> None:
        engine = self.engine
        if engine is not None and engine.step % self.comm.copy_every == 0 and self.compressor.conserves:
            self._buddy.copy(engine.store.memory(), self._by_name, self.comm, engine.runner.scheduler.start)

    @property
    def _by_name(self) -> dict[str, Tensor]:
        return {name: param for param, name in self.names.items()}

    # -- state -------------------------------------------------------------------------------------------------------

    def expect_hooks(self) -> None:
        """Note that state is about to be saved or loaded, by torch's hooks or without them."""
        self.has_run_hooks = False

    def enter_hook(self) -> None:
        """Note that a hook of torch's saves or loads state, and keep up with the wire."""
        self.has_run_hooks = True
        self.keep_up()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of an engine."""
        if self.engine is None and any(state["memory"].values()):
            self._connect()
        if self.engine is not None:
            self.follow_groups()
            self.engine.restore(state)

    def restore_apart(self, state: dict[str, Any]) -> None:
        """Restore a state that was saved apart from the optimizer's own; see `dgcopt.sharded.load`."""
        self.late_warning.cancel()
        self.restore(state)


def synchronised(optimizer: Any) -> Synchronised | None:
    """Return the part of `DistributedOptimizer` in an optimizer; None if it has not wrapped it."""
    steps = held(optimizer).gradients
    assert steps is None or isinstance(steps, Synchronised)
    return steps


def steps_of(optimizer: Optimizer) -> Synchronised:
    """Return the part of `DistributedOptimizer` in an optimizer that it has wrapped."""
    steps = stepping_of(optimizer)
    assert isinstance(steps, Synchronised)
    return steps
