"""DistributedOptimizer: any torch optimizer, with gradients averaged over ranks before each step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
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
from ..exchange.divergence import OnDivergence, check_on_divergence
from ..exchange.group_settings import check_may_differ
from ..exchange.held import check_names, held, hold, without
from ..exchange.parameters import check_optimizer, check_trainable, given_names, unique_names
from ..exchange.telemetry import Telemetry
from ..exchange.uneven import JoinHook
from ..flat.local_shard import as_stepped, is_sharded, local_shards
from ..flat.optimizer_state import STATE_KEY, kept_by, take_mark
from .amp import agree_with_scaler
from .replicas import check_on_mesh, comm_of_replicas
from .settings import Settings, check_groups, check_op, check_passes, check_predivide
from .state_dict import Stateful, load_state, save_state
from .stepping import Grads, Mode, step_of, stepping_of
from .subclass import bare_class, become
from .synchronised import Synchronised, steps_of

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


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
    become(optimizer, Distributed, step_of)
    steps = Synchronised(optimizer, names, given, compressor, settings)
    hold(optimizer, gradients=steps)
    optimizer.register_state_dict_post_hook(save_state)
    optimizer.register_load_state_dict_pre_hook(load_state)
    step = take_mark(optimizer.param_groups, STATE_KEY, comm.rank)
    steps.join(comm)
    if step:
        steps.restore(kept_by(comm.rank, comm.size, step))


class Distributed(Stateful):
    """The methods that the class of a wrapped optimizer gains; never instantiated. `held` keeps its attributes."""

    @property
    def compressor(self) -> Compressor:
        """The compressor of the gradients."""
        return steps_of(self).compressor

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far; all zero in a single process."""
        engine = steps_of(self).engine
        return engine.telemetry if engine is not None else Telemetry()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of this rank's residuals; 0.0 for compressors without any."""
        engine = steps_of(self).engine
        return engine.store.residual_norm() if engine is not None else 0.0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per exchange, from the next step on."""
        steps_of(self).settings.add_up(passes)

    def rejoin(self, comm: Comm | None = None) -> None:
        """Continue over another wire, after ranks were lost or have joined (`dgcopt.shutdown()`, `dgcopt.init()`).

        Keeps the memory of this rank; an unfinished step is lost. All ranks of `comm` must call it.
        """
        steps_of(self).rejoin(comm)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        steps_of(self).synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step()` uses the gradients as they are, after a manual `synchronize()`."""
        with steps_of(self).within(Mode.AS_THEY_ARE):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate: nothing is sent, and no pass is counted."""
        with steps_of(self).within(Mode.ADD_UP):
            yield

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Average the gradients and clip their total norm; the next `step()` uses the result.

        As `torch.nn.utils.clip_grad_norm_`, on the same values on every rank; returns the norm before clipping, NaN in
        a step that no rank takes. Under AMP call `scaler.unscale_(optimizer)` first. Clipping of each rank's own
        gradient, before it is compressed, is `dgcopt.DGC(clip=...)`.
        """
        steps_of(self).fix()
        params = [param for group in self.param_groups for param in group["params"]]
        if steps_of(self).grads is Grads.VOID:  # gradients are each rank's own, and some may be sparse
            if error_if_nonfinite:
                raise RuntimeError("The gradient of some rank holds NaN or Inf, so its norm is not finite.")
            return torch.full((), torch.nan, dtype=params[0].dtype, device=params[0].device)
        norm: Any = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if is_sharded(norm) else norm

    # -- as torch's --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero as torch does; in-flight exchanges are cancelled on all ranks."""
        stepping_of(self).cancel()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any], names: Sequence[str] | None = None) -> None:
        """Add a group as torch does; its parameters are exchanged from the next step on.

        `names` are the names of parameters that `named_parameters` did not hold; None numbers them. Raises ConfigError,
        and adds nothing, for another number of names, names of other parameters, and parameters that cannot be
        averaged.
        """
        super().add_param_group(param_group)
        try:
            steps_of(self).added(names)
        except ConfigError:
            del self.param_groups[-1]
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `torch.amp.GradScaler.step` before it checks for Inf: here all ranks agree on Inf."""
        steps = steps_of(self)
        if steps.engine is None:
            return bool(vars(self).get("_step_supports_amp_scaling", False))
        return agree_with_scaler(steps)

    # -- uneven data, by torch.distributed.algorithms.Join -----------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook for torch's Join: steps without data until every rank has run out of data.

        Averages divide by all ranks, or, as DDP's, with `Join(..., divide_by_initial_world_size=False)` by those that
        have data.
        """
        engine = steps_of(self).engine
        if engine is None:  # no work in a single process
            return torch.distributed.algorithms.JoinHook()
        divide_by_all = kwargs.get("divide_by_initial_world_size", True)
        return JoinHook(engine.runner, engine.serve_step, engine.participation, divide_by_all)

    @property
    def join_device(self) -> torch.device:
        """Device of Join's own collectives, for `torch.distributed.algorithms.Join`."""
        return steps_of(self).comm.to_wire(torch.zeros(1)).device

    @property
    def join_process_group(self) -> Any:
        """Process group, for torch's Join. Raises ConfigError on other wires than torch.distributed."""
        comm = steps_of(self).comm
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
        steps = steps_of(self)
        steps.follow_groups()
        named = {as_stepped(param): name for param, name in steps.names.items()}
        own = [named[param] for group in self.param_groups for param in group["params"]]
        names = dict(zip(params, own, strict=True))
        _wrap(twin, names, dict(names), copy.deepcopy(steps.compressor), copy.copy(steps.settings), steps.comm)
        if steps.engine is not None:
            steps_of(twin).restore(steps.engine.state())
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


def _bare_state(optimizer: Optimizer) -> Any:
    """Return the optimizer's own state, for copies and pickles."""
    state = optimizer.__getstate__()
    return without(state) if isinstance(state, dict) else state
