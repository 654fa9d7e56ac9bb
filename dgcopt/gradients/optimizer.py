"""DistributedOptimizer: any torch optimizer, with gradients averaged over ranks before each step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Comm, current_comm
from ..compressors import Adasum, Compressor, NoCompression, accept
from ..compressors.own_step import check_steps_alone
from ..errors import ConfigError
from ..errors.checks import check_flag, check_positive, check_whole
from ..exchange.agreement import compare
from ..exchange.broadcast import broadcast_optimizer_state
from ..exchange.divergence import OnDivergence, check_on_divergence
from ..exchange.group_settings import check_may_differ
from ..exchange.held import check_names, held, hold, without
from ..exchange.late_warning import LateWarning
from ..exchange.losses import Buddy, repeat_after_losses
from ..exchange.parameters import check_optimizer, check_trainable, given_names, number, unique_names
from ..exchange.telemetry import Telemetry
from ..exchange.uneven import JoinHook
from ..exchange.untraced import untraced
from ..flat.local_shard import LocalShard, as_dtensor, is_sharded, local, local_shards
from ..flat.optimizer_state import (
    SHARD,
    STATE_KEY,
    THROUGH_TORCH,
    check_shard,
    kept_by,
    own_part,
    put_mark,
    take_mark,
    unmarked,
)
from ..flat.store import check_format
from .engine import Engine
from .introspection import broadcasting_root
from .replicas import check_on_mesh, check_shards, comm_of_replicas, shard_of
from .settings import Settings, check_groups, check_op, check_passes, check_predivide
from .stepping import Mode, Stepping, after_step, before_step, between_hooks
from .subclass import bare_class, become

__all__ = ["Distributed", "DistributedOptimizer", "Synchronised", "synchronised"]

log = logging.getLogger("dgcopt")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Of = TypeVar("Of")


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | Any = None,
    backward_passes_per_step: int = 1,
    op: Any = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    comm: Comm | None = None,
    mesh: Any = None,
    bucket_mb: float | None = None,
    first_bucket_mb: float | None = None,
    check_replicas_every: int = 0,
    on_divergence: OnDivergence = "raise",
    may_differ: Sequence[str] = (),
) -> AnyOptimizer:
    """Make `optimizer` average its gradients over all ranks, compressed, while backward runs.

    Returns the same object, its class replaced by a generated subclass, so schedulers, GradScaler and other references
    keep working. It gains `synchronize()`, `skip_synchronize()`, `no_sync()`, `clip_grad_norm_()`,
    `set_backward_passes_per_step()`, `rejoin()`, `telemetry`, `compressor` and `residual_norm()`. In a single process
    nothing is hooked and nothing sent. The first ten arguments are those of `horovod.torch.DistributedOptimizer`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: `model.named_parameters()`, for errors and checkpoints that name parameters. None numbers
            them by group and position.
        compression: the compressor of gradients, copied; None sends them uncompressed.
            Horovod's `hvd.Compression.none` and `fp16` are accepted too.
        backward_passes_per_step: number of backward passes that are added up before an exchange. With 1, any number
            may precede `step()`; the usual number is learned from the first steps. Above 1, further passes are an
            error.
        op: "average", "sum" or "adasum" over ranks, or Horovod's `Average`, `Sum`, `Adasum`. Adasum
            (Maleki et al., 2020) combines the updates that the optimizer makes from local gradients.
        gradient_predivide_factor: divisor before the sum; the rest is divided after it. With "average" only.
        groups: parameters that share a bucket: a number of buckets, or lists of parameters.
        num_groups: the number of buckets, by Horovod's deprecated name.
        sparse_as_dense: exchange sparse gradients (of embeddings) like dense ones.
        process_set: exchange only among these ranks: a sequence, or Horovod's ProcessSet; outside, a step is local.
            Every rank must give the same. "node" or "across": among the ranks of this machine, or the ranks with this
            local rank on all machines that have one.
        comm: the wire; None is the one of `dgcopt.init()`.
        mesh: for parameters that `fully_shard` has sharded, the dimension of the device mesh over which the model is
            replicated, `mesh["replicate"]`: each rank's shards are exchanged within it. None derives it from the
            parameters' own mesh.
        bucket_mb, first_bucket_mb: megabytes of gradient per bucket, and in the first one. Larger buckets overlap less;
            smaller ones cost more messages, and launches on a GPU. None: 25 and 1 if buckets launch during backward
            (1,000 and 250 for compressed gradients on a GPU); 100 each if they launch at the step, as with DGC on a
            CPU. A `bucket_mb` is also the most for the first one.
        check_replicas_every: steps between bitwise comparisons of all parameters over ranks; 0 for none. They are
            always compared before the first step.
        on_divergence: reaction to a difference: "raise" DivergenceError, "resync" from rank 0, or "warn" and continue.
        may_differ: settings of parameter groups, such as `("lr",)`, that differ between ranks on purpose. All others
            (learning rate, momentum, weight decay) are compared in the vote of every step; tensors on an accelerator
            only before the first step. `on_divergence` applies to differences.

    Raises ConfigError (a ValueError) for anything but a torch optimizer or a framework's wrapper of one, for parameters
    without a unique name or that cannot be trained, and for settings out of range; MismatchError if ranks differ in
    parameters or settings, now or in any later step.
    """
    if isinstance(optimizer, Distributed):
        raise ConfigError("this optimizer is distributed already: wrap it once")
    check_optimizer(optimizer)
    check_names(optimizer, ADDED)
    op = check_op(op)
    check_on_divergence(on_divergence)
    compressor = NoCompression() if compression is None else copy.deepcopy(accept(compression))
    if op == "adasum":
        compressor = Adasum.carrying(compressor)
    given = given_names(named_parameters)
    names = unique_names(optimizer, given)
    sharded = any(map(is_sharded, names))
    check_trainable(names, may_be_sharded=True)
    settings = Settings(
        op,
        check_passes(backward_passes_per_step),
        check_predivide(gradient_predivide_factor, op),
        check_groups(names, groups, num_groups),
        check_flag(sparse_as_dense, "sparse_as_dense"),
        None if bucket_mb is None else check_positive(bucket_mb, "bucket_mb"),
        None if first_bucket_mb is None else check_positive(first_bucket_mb, "first_bucket_mb"),
        check_whole(check_replicas_every, "check_replicas_every", 0),
        on_divergence,
        check_may_differ(may_differ, optimizer),
    )

    comm = current_comm(comm)
    if sharded or mesh is not None:
        comm = _among_replicas(comm, names, compressor, mesh, process_set)
    elif process_set is not None and getattr(process_set, "process_set_id", None) != 0:  # 0: all ranks
        comm = comm.among(process_set)
    averaging = held(optimizer).averaging
    if averaging is not None and comm.size >= averaging.comm.size:
        raise ConfigError(
            f"this optimizer's weights are averaged by {averaging.rule!r}, which has no effect if its gradients are "
            f"averaged over the same ranks at every step. Remove one of the two, or give DistributedOptimizer a "
            f"process_set of fewer ranks."
        )
    _wrap(optimizer, names, given or {}, compressor, settings, comm)
    return optimizer


def _among_replicas(comm: Comm, names: dict[Tensor, str], compressor: Compressor, mesh: Any, process_set: Any) -> Comm:
    """Return the comm of this rank's shards. Raises ConfigError for settings that do not fit sharded parameters."""
    check_on_mesh(names, mesh)
    if process_set is not None and (mesh is not None or process_set != "across"):
        raise ConfigError(
            "sharded parameters are exchanged among the ranks that hold the same shard: give mesh=mesh['replicate'] "
            "in place of process_set"
        )
    return comm_of_replicas(comm, names, compressor, mesh, process_set == "across")


def _wrap(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    given: dict[Tensor, str],
    compressor: Compressor,
    settings: Settings,
    comm: Comm,
) -> None:
    """Change the optimizer's class, and join the wire."""
    names = local_shards(names)
    compressor.see_parameters(names, given.values())
    compressor.attach(optimizer)
    if compressor.sends == "update":
        check_steps_alone(optimizer, f"{type(compressor).__name__} sends the update that it makes")
    become(optimizer, Distributed, between_hooks)
    steps = Synchronised(optimizer, names, given, compressor, settings)
    hold(optimizer, gradients=steps)
    step = take_mark(optimizer.param_groups, STATE_KEY, comm.rank)
    steps.join(comm)
    if step:
        steps.restore(kept_by(comm.rank, comm.size, step))


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
        self._place: int | None = None
        """Its number among the optimizers of the wire, in wrapping order."""
        optimizer.register_state_dict_post_hook(_save_state)
        optimizer.register_load_state_dict_pre_hook(_load_state)

    @property
    def is_sharded(self) -> bool:
        """True if the optimizer steps DTensors, whose local shards are exchanged."""
        return any(isinstance(param, LocalShard) for param in self.names)

    def shard(self) -> dict[str, Any] | None:
        """Return which shards this rank holds, as a checkpoint records it; None where parameters are whole."""
        return shard_of(self.names, self.comm) if self.is_sharded else None

    def added(self, names: Sequence[str] | None) -> None:
        """Take in the parameters of a group that the optimizer was given; raises ConfigError if that cannot be."""
        added = self._named(self.optimizer.param_groups[-1]["params"], names)
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
                f"two parameters cannot have one name, by which what is held back is kept: {[*named.values()]}, of "
                f"which the optimizer has {taken} already. Give add_param_group other names"
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

    # -- where ranks survive -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step as `keep_up` does; if ranks survive and no step is in progress, also admit new ones."""
        self.keep_up()
        if self.comm.survives and not (self.engine is not None and self.engine.in_flight):
            self._admit()
            self._follow()

    def exchange(self, act: Callable[[Engine], Of]) -> Of | None:
        """Let the engine exchange something; after a loss, again with the ranks that are left.

        Returns None if the step has been committed by the time of the loss, and so is over.
        """

        def attempt() -> Of:
            assert self.engine is not None
            return act(self.engine)

        if self._is_part_of_round:
            self._follow()
            return attempt()
        return repeat_after_losses(attempt, self.comm, self._follow, self._count_lost, self._admit)

    def leave_losses(self) -> None:
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
        if self.comm.waits_at_start:  # otherwise done at the first step
            self.comm.drive(compare(self.wrapped.describe(self.settings), self.comm.rank, "parameters and settings"))
        if not self._is_hooked:
            self._is_hooked = True
            self.optimizer.register_step_pre_hook(untraced(before_step))
            self.optimizer.register_step_post_hook(untraced(after_step))
        self.watch_parameters()

    def end_step(self, failed: bool = False) -> None:
        """End a step as `Stepping.end_step` does; if set, also copy this rank's residual every few steps."""
        super().end_step(failed)
        engine, every = self.engine, self.comm.copy_every
        if engine is not None and not failed and every and engine.step % every == 0 and self.compressor.conserves:
            self._buddy.copy(engine.store.memory(), self._by_name, self.comm, engine.runner.scheduler.start)

    @property
    def _by_name(self) -> dict[str, Tensor]:
        return {name: param for param, name in self.names.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of an engine."""
        if self.engine is None and any(state["memory"].values()):
            self._connect()
        if self.engine is not None:
            self.engine.restore(state)

    def restore_apart(self, state: dict[str, Any]) -> None:
        """Restore a state that was saved apart from the optimizer's own; see `dgcopt.sharded.load`."""
        self.late_warning.cancel()
        self.restore(state)


class Distributed(Optimizer):
    """The methods that the class of a wrapped optimizer gains; never instantiated. `held` keeps its attributes."""

    @property
    def compressor(self) -> Compressor:
        """The compressor of the gradients."""
        return _part(self).compressor

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far; all zero in a single process."""
        engine = _part(self).engine
        return engine.telemetry if engine is not None else Telemetry()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of this rank's residuals; 0.0 for compressors without any."""
        engine = _part(self).engine
        return engine.store.residual_norm() if engine is not None else 0.0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per exchange, from the next step on."""
        _part(self).settings.add_up(passes)

    def rejoin(self, comm: Comm | None = None) -> None:
        """Continue over another wire, after ranks were lost or have joined (`dgcopt.shutdown()`, `dgcopt.init()`).

        Keeps the memory of this rank; an unfinished step is lost. All ranks of `comm` must call it.
        """
        _part(self).rejoin(comm)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        _part(self).synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step()` uses the gradients as they are, after a manual `synchronize()`."""
        with _part(self).within(Mode.AS_THEY_ARE):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate: nothing is sent, and no pass is counted."""
        with _part(self).within(Mode.ADD_UP):
            yield

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Average the gradients and clip their total norm; the next `step()` uses the result.

        As `torch.nn.utils.clip_grad_norm_`, on the same values on every rank; returns the norm before clipping. Under
        AMP call `scaler.unscale_(optimizer)` first. Clipping of each rank's own gradient, before it is compressed, is
        `dgcopt.DGC(clip=...)`.
        """
        _part(self).fix()
        params = [param for group in self.param_groups for param in group["params"]]
        norm: Any = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if is_sharded(norm) else norm

    # -- as torch's --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero as torch does; in-flight exchanges are cancelled on all ranks."""
        _part(self).discard()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any], names: Sequence[str] | None = None) -> None:
        """Add a group as torch does; its parameters are exchanged from the next step on.

        `names` are theirs, where `named_parameters` did not hold them; else they are numbered. Raises ConfigError, and
        adds nothing, for another number of names, names of other parameters, and parameters that cannot be averaged.
        """
        super().add_param_group(param_group)
        try:
            _part(self).added(names)
        except ConfigError:
            del self.param_groups[-1]
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state as torch does, with this rank's memory."""
        steps = _part(self)
        steps.has_run_hooks = False
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if steps.has_run_hooks or "param_groups" not in state:
            return state
        state = {**state, "param_groups": [dict(group) for group in state["param_groups"]]}
        return _save_state(self, state) or state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state as torch does. Raises ConfigError for a state of another kind of optimizer."""
        steps = _part(self)
        steps.has_run_hooks = False
        # not every optimizer's groups hold all of `defaults`: Muon's lack `differentiable`
        needed = [key for key in self.defaults if all(key in group for group in self.param_groups)]
        state, groups = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict, *args, **kwargs)
            lacking = [key for key in needed if any(key not in group for group in self.param_groups)]
        except KeyError as error:
            lacking = [*map(str, error.args)]
        if lacking:
            self.state, self.param_groups = state, groups
            raise ConfigError(
                f"this state lacks {', '.join(lacking)}, which {type(self).__name__} needs: another kind of optimizer "
                f"saved it. Rebuild that optimizer, or start this one without the state."
            )
        if not steps.has_run_hooks:
            _load_state(self, state_dict)
            for group, own in zip(self.param_groups, [*map(unmarked, self.param_groups)], strict=True):
                group.clear()
                group.update(own)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `torch.amp.GradScaler.step` before it looks for Inf: the moment for all ranks to agree."""
        steps = _part(self)
        if steps.engine is None:
            return bool(vars(self).get("_step_supports_amp_scaling", False))
        return steps.agree_with_scaler()

    # -- uneven data, by torch.distributed.algorithms.Join -----------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook for torch's Join: steps without data until every rank has run out of data.

        Averages divide by all ranks, or, as DDP's, with `Join(..., divide_by_initial_world_size=False)` by those that
        have data.
        """
        engine = _part(self).engine
        if engine is None:  # no work in a single process
            return torch.distributed.algorithms.JoinHook()
        divide_by_all = kwargs.get("divide_by_initial_world_size", True)
        return JoinHook(engine.runner, engine.serve_step, engine.participation, divide_by_all)

    @property
    def join_device(self) -> torch.device:
        """Device of Join's own collectives, for `torch.distributed.algorithms.Join`."""
        return _part(self).comm.to_wire(torch.zeros(1)).device

    @property
    def join_process_group(self) -> Any:
        """Process group, for torch's Join. Raises ConfigError on other wires than torch.distributed."""
        comm = _part(self).comm
        if not hasattr(comm, "process_group"):
            raise ConfigError(
                f"torch.distributed.algorithms.Join needs the wire torch, and this optimizer exchanges over "
                f"{comm.wire}: use dgcopt.join(optimizer), which works on every wire"
            )
        return comm.process_group

    # -- copies ------------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the bare optimizer: a wire cannot be stored."""
        # not copyreg.__newobj__, which pickle takes for the object's own class alone
        return object.__new__, (bare_class(self),), _bare_state(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as a distributed optimizer of copied parameters; all ranks must copy alike."""
        base = bare_class(self)
        twin: Any = base.__new__(base)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(_bare_state(self), memo))
        params = [param for group in twin.param_groups for param in group["params"]]
        steps = _part(self)
        names = dict(zip(params, steps.names.values(), strict=True))
        _wrap(twin, names, dict(names), copy.deepcopy(steps.compressor), copy.copy(steps.settings), steps.comm)
        if steps.engine is not None:
            _part(twin).restore(steps.engine.state())
        return twin


ADDED = (
    "clip_grad_norm_",
    "compressor",
    "no_sync",
    "rejoin",
    "residual_norm",
    "set_backward_passes_per_step",
    "skip_synchronize",
    "synchronize",
    "telemetry",
)
"""Names that wrapping adds; for all others the optimizer keeps its own attributes, or overrides torch's."""


def synchronised(optimizer: Any) -> Synchronised | None:
    """Return the part of `DistributedOptimizer` in an optimizer; None if it has not wrapped it."""
    steps = held(optimizer).gradients
    assert steps is None or isinstance(steps, Synchronised)
    return steps


def _part(optimizer: Optimizer) -> Synchronised:
    steps = synchronised(optimizer)
    assert steps is not None
    return steps


def _bare_state(optimizer: Optimizer) -> Any:
    """Return the optimizer's own state, for copies and pickles."""
    state = optimizer.__getstate__()
    return without(state) if isinstance(state, dict) else state


def _save_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    steps = _part(optimizer)
    steps.has_run_hooks = True
    steps.keep_up()
    root = broadcasting_root()
    if root is not None:
        # Horovod's does not know this memory, and hangs if ranks keep different kinds for a parameter:
        # do its work, and leave it the settings
        broadcast_optimizer_state(optimizer, root)
        groups = [unmarked(group) for group in optimizer.state_dict()["param_groups"]]
        return {"state": {"sent": {}}, "param_groups": groups}
    engine = steps.engine
    if engine is not None:
        if not engine.runner.busy:
            steps.wrapped.commit.check(steps.comm.rank)
        state = engine.state()
        shard: dict[str, Any] = {SHARD: steps.shard()} if steps.is_sharded else {}
        state_dict[STATE_KEY] = kept_by(steps.comm.rank, steps.comm.size, **state, **shard)
        put_mark(state_dict, STATE_KEY, engine.step, state["memory"])
    return None


def _load_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    steps = _part(optimizer)
    steps.has_run_hooks = True
    steps.keep_up()
    rank, size = steps.comm.rank, steps.comm.size
    if "param_groups" not in state_dict:
        raise ConfigError("this is no optimizer's state: optimizer.state_dict() has param_groups, a model's has none")
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        return None  # torch refuses them: memory stays as it is
    if STATE_KEY in state_dict:
        check_format(state_dict[STATE_KEY])
        check_shard(state_dict[STATE_KEY], steps.shard())
    steps.wrapped.commit.end()
    steps.wrapped.count_taken()
    if STATE_KEY in state_dict:
        state = state_dict[STATE_KEY]
        if (state["rank"], state["world_size"]) in steps.formerly:
            state = {**state, "rank": rank, "world_size": size}
        steps.restore(own_part(state, rank, size))
    else:
        tell = steps.late_warning.set if steps.is_sharded else log.warning  # dgcopt.sharded.load follows
        if step := take_mark([dict(group) for group in groups], STATE_KEY, rank, tell):
            steps.restore(kept_by(rank, size, step))
    kept = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    if steps.is_sharded:
        kept["state"] = _on_own_mesh(optimizer, state_dict)
    return {**kept, "param_groups": [unmarked(group) for group in groups]}


def _on_own_mesh(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Return each parameter's state on the mesh of that parameter: another replica may have saved it."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    own = [param for group in optimizer.param_groups for param in group["params"]]
    param_of = {key: LocalShard.of(param) for key, param in zip(saved, own, strict=True) if is_sharded(param)}

    def moved(value: Any, param: LocalShard) -> Any:
        is_on_a_mesh = isinstance(value, Tensor) and is_sharded(value)
        return as_dtensor(local(value), param) if is_on_a_mesh else value

    return {
        key: {name: moved(value, param_of[key]) for name, value in values.items()} if key in param_of else values
        for key, values in state_dict["state"].items()
    }
