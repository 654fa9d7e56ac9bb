"""DistributedOptimizer: any torch optimizer, averaging its gradients over ranks before it steps."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import STATE_KEY, own_part, put_mark, take_mark, unmarked
from ..checks import check_positive, check_whole
from ..collectives import AllReduce
from ..comm import Comm, broadcasting_root, current_comm
from ..compressors import Adasum, Compressor, NoCompression, accept
from ..compressors.own_step import check_steps_alone, passes_over_missing_gradients
from ..errors import ConfigError
from ..exchange.agreement import compare
from ..exchange.broadcast import broadcast_optimizer_state
from ..exchange.divergence import OnDivergence, check_on_divergence, digest
from ..exchange.parameters import (
    check_optimizer,
    check_trainable,
    describe,
    describe_groups,
    given_names,
    number,
    unique_names,
)
from ..exchange.telemetry import Telemetry
from ..version import __version__
from .engine import Engine
from .settings import Settings, check_groups, check_op, check_passes, check_predivide
from .sparse_step import step_touched

__all__ = ["DistributedOptimizer"]

log = logging.getLogger("dgcopt")

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
    bucket_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
    check_replicas_every: int = 0,
    on_divergence: OnDivergence = "raise",
) -> AnyOptimizer:
    """Make `optimizer` average its gradients over all ranks, compressed, while backward still runs.

    The very object comes back: its class becomes a subclass of the one it had, so schedulers, GradScaler and other
    references keep working. It gains `synchronize()`, `skip_synchronize()`, `no_sync()`, `clip_grad_norm_()`,
    `set_backward_passes_per_step()`, `rejoin()`, `telemetry`, `compressor` and `residual_norm()`. In a single process
    nothing is hooked and nothing sent. The first ten arguments are those of `horovod.torch.DistributedOptimizer`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: `model.named_parameters()`, for errors and checkpoints that name parameters. None numbers
            them by group and position.
        compression: how gradients travel; None sends them as they are. The optimizer takes a copy of its own.
            Horovod's `hvd.Compression.none` and `fp16` are accepted too.
        backward_passes_per_step: gradients of so many backward passes are added up before they are exchanged. Left at
            1, any number may come before `step()`; how many usually do is learned from the first steps. Above 1, more
            are an error.
        op: "average", "sum" or "adasum" over ranks, or Horovod's `Average`, `Sum`, `Adasum`. Adasum
            (Maleki et al., 2020) combines the updates that the optimizer makes of the local gradients.
        gradient_predivide_factor: divide by so much before the sum, and by the rest after it; with "average" only.
        groups: put parameters that are to travel together into one bucket, by a number of buckets or as lists.
        num_groups: that number, by the name that Horovod has deprecated.
        sparse_as_dense: exchange sparse gradients (of embeddings) like dense ones.
        process_set: exchange only among these ranks: a sequence, or Horovod's ProcessSet; outside, a step is local.
            Every rank must say the same. "node" or "across": among the ranks of this machine, or those of this local
            rank on all machines that have so many.
        comm: the wire; None is the one of `dgcopt.init()`.
        bucket_mb, first_bucket_mb: megabytes of gradient per bucket. Larger costs overlap, smaller costs messages.
        check_replicas_every: compare all parameters over ranks, bit for bit, every so many steps; 0 never does.
        on_divergence: "raise" DivergenceError if they differ, or "resync" from rank 0. Before the first step they are
            always compared.

    Raises ConfigError (a ValueError) for what is no torch optimizer or a framework's wrapper of one, for parameters
    that have no name, two with one name, or that cannot be trained, and for settings out of range; MismatchError if
    ranks differ in parameters or settings.
    """
    if isinstance(optimizer, _Distributed):
        raise ConfigError("this optimizer is distributed already: wrap it once")
    check_optimizer(optimizer)
    op = check_op(op)
    check_on_divergence(on_divergence)
    compressor = NoCompression() if compression is None else copy.deepcopy(accept(compression))
    if op == "adasum":
        compressor = Adasum.carrying(compressor)
    given = given_names(named_parameters)
    names = unique_names(optimizer, given)
    check_trainable(names)
    settings = Settings(
        op,
        check_passes(backward_passes_per_step),
        check_predivide(gradient_predivide_factor, op),
        check_groups(names, groups, num_groups),
        bool(sparse_as_dense),
        check_positive(bucket_mb, "bucket_mb"),
        check_positive(first_bucket_mb, "first_bucket_mb"),
        check_whole(check_replicas_every, "check_replicas_every", 0),
        on_divergence,
    )

    comm = current_comm() if comm is None else comm
    if process_set is not None and getattr(process_set, "process_set_id", None) != 0:  # 0 is Horovod's of all ranks
        comm = comm.among(process_set)
    averaging = getattr(optimizer, "averaging", None)
    if averaging is not None and comm.size >= averaging.comm.size:
        raise ConfigError(
            f"the weights of this optimizer are averaged now and then, by {averaging.rule!r}, which is no use if "
            f"gradients are averaged over the same ranks at every step: leave one of them away, or give "
            f"DistributedOptimizer a process_set of fewer ranks"
        )
    _wrap(optimizer, names, given or {}, compressor, settings, comm)
    return optimizer


def _wrap(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    given: dict[Tensor, str],
    compressor: Compressor,
    settings: Settings,
    comm: Comm,
) -> None:
    """Give the optimizer its new class, and what that needs."""
    base: Any = type(optimizer)
    kind = _subclass(base)
    _bind_anew(optimizer, kind)
    optimizer.__class__ = kind
    assert isinstance(optimizer, _Distributed)
    optimizer.compressor = compressor
    optimizer._parameter_names = names
    optimizer._given_names = given
    optimizer._settings = settings
    optimizer._formerly = set()
    optimizer.register_state_dict_post_hook(_save_state)
    optimizer.register_load_state_dict_pre_hook(_load_state)
    step = take_mark(optimizer.param_groups, comm.rank)
    optimizer._join(comm)
    if step:
        optimizer._restore({"memory": {}, "order": [], "step": step})


class _Distributed(Optimizer):
    """What the wrapped optimizer's class gains; never instantiated."""

    comm: Comm
    compressor: Compressor
    _engine: Engine | None = None
    _parameter_names: dict[Tensor, str]
    _given_names: dict[Tensor, str]
    _settings: Settings
    _formerly: set[tuple[int, int]]
    """The rank that this process was, of how many, before Horovod was started anew."""
    _hooked: set[Tensor]
    _synchronizing = True
    _accumulating = False
    _synchronized = False
    _expects_step = False
    _warned = False
    _is_void = False
    _raw = False
    _is_done = False
    _may_leave = False
    _hidden: list[tuple[Tensor, Tensor | None]]
    _bare_step: Callable[..., Any]

    # -- stepping ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's own step, without any exchange or hook: `optimizer.step()` is the subclass's."""
        before, self._raw = self._raw, True
        try:
            return self._bare_step(*args, **kwargs)
        finally:
            self._raw = before

    def _step_unless_done(self, *args: Any, **kwargs: Any) -> Any:
        """What happens between the hooks of a step: the optimizer's own one, where that is left to do."""
        if self._is_done:
            return None
        self._may_leave = True
        try:
            return _Distributed.step(self, *args, **kwargs)
        except _Done as done:
            return done.loss
        finally:
            self._may_leave = False

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        if self._engine is not None and not self._synchronized:
            self._keep_up()
        if self._engine is not None and not self._synchronized:
            self._hook_parameters()
            self._engine.synchronize()
            self._is_void = self._engine.void
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step()` uses the gradients as they are, after `synchronize()` was called by hand."""
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes only add up: nothing is sent, and no pass is counted."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Average the gradients and clip the norm of all of them together; the next `step()` takes them as they are.

        As `torch.nn.utils.clip_grad_norm_`, on the same values on every rank; returns the norm before clipping. Under
        AMP call `scaler.unscale_(optimizer)` first. Clipping of each rank's own gradient, before it is compressed, is
        `dgcopt.DGC(clip=...)`.
        """
        self.synchronize()
        self._expects_step = True
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are added up before gradients are exchanged, from the next step on."""
        self._settings.backward_passes_per_step = check_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`. Gradients that are on their way are taken back, on all ranks."""
        if self._engine is not None:
            self._engine.discard()
            self._synchronized = self._expects_step = self._is_void = False
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`; the new parameters are exchanged from the next step on."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        for place, param in enumerate(self.param_groups[-1]["params"]):
            self._parameter_names[param] = self._given_names.get(param, number(group, place))
        check_trainable(self._parameter_names)
        if self._engine is not None:
            self._hook_parameters()

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far; all zero in a single process."""
        return self._engine.telemetry if self._engine is not None else Telemetry()

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0.0 for compressors that hold nothing back."""
        return self._engine.residual_norm() if self._engine is not None else 0.0

    # -- joining a wire ----------------------------------------------------------------------------------------------

    def rejoin(self, comm: Comm | None = None) -> None:
        """Go on over another wire, after ranks were lost or have come (`dgcopt.shutdown()`, `dgcopt.init()`).

        Keeps what this rank remembers; a step that was under way is lost. All ranks of `comm` must call it.
        """
        comm = current_comm() if comm is None else comm
        engine, self._engine = self._engine, None
        kept = engine.kept() if engine is not None else None
        self._join(comm)
        if kept is not None:
            self._restore(kept)
        if engine is not None and self._engine is not None:
            self._engine.telemetry = engine.telemetry

    def _keep_up(self) -> None:
        """Rejoin if the ranks that this optimizer was of are no more, as `hvd.elastic.run` has started Horovod anew.

        Raises ConfigError where that cannot be right; it is no HorovodInternalError, after which all would try again.
        """
        if not self.comm.is_void():
            return
        left = self.comm
        if left.is_part or hasattr(self, "averaging"):
            what = "exchanges among some of the ranks" if left.is_part else "averages weights too"
            raise ConfigError(
                f"Horovod was started anew, and this optimizer {what}, so it cannot join the new ranks by itself: use "
                f"dgcopt.elastic.State in place of hvd.elastic.TorchState, which takes optimizers of all ranks"
            )
        if self._engine is not None:
            self._engine.abandon()
        self.rejoin()
        self._formerly.add((left.rank, left.size))
        log.warning(
            "dgcopt: Horovod was started anew, and this optimizer has rejoined: it was rank %d of %d, and is rank %d "
            "of %d. It keeps what it has not sent yet (norm %.3g). What lost ranks had not sent is lost, which "
            "dgcopt.elastic.State would have shared out; new ranks start with nothing",
            *(left.rank, left.size, self.comm.rank, self.comm.size, self.residual_norm()),
        )

    def _join(self, comm: Comm) -> None:
        self.comm = comm
        self._hidden = []
        self._synchronized = self._expects_step = self._is_void = False
        if comm.size > 1:
            self._connect()

    def _connect(self) -> None:
        """Start to exchange. In one process, only if there is something left to add that others have held back."""
        assert self._engine is None
        self._engine = Engine(
            self._parameter_names,
            self.compressor,
            self.comm,
            self._settings,
            self._describe,
            self._describe_start,
            self._replicated,
            self._local_update,
        )
        if not (self.comm.constructs_in_turn or self.comm.elastic):  # else it is done at the first step
            self.comm.drive(compare(self._describe(), self.comm.rank, "parameters and settings"))
        if not hasattr(self, "_hooked"):
            self._hooked = set()
            self.compressor.attach(self)
            if self.compressor.sends == "update":
                check_steps_alone(self, f"{type(self.compressor).__name__} sends the update that it makes")
            self.register_step_pre_hook(_before_step)
            self.register_step_post_hook(_after_step)
        self._hook_parameters()

    def _describe(self) -> list[str]:
        settings = {"compression": self.compressor, **vars(self._settings)}
        return describe(self, self._parameter_names, settings, __version__)

    def _describe_start(self) -> list[str]:
        if self.comm.rank == 0 and _is_averaged_by_ddp(self._parameter_names):
            log.warning(
                "dgcopt: DistributedDataParallel averages these parameters' gradients too: what it sends comes on top "
                "of what telemetry counts, and saves nothing. Give dgcopt.ddp_hook to DDP in place of "
                "DistributedOptimizer, or train the bare model"
            )
        states = {name: state for name, (_, *state) in self._replicated().items() if state}
        digests = [f"state of parameter {name}: {bytes(digest(s).tolist()).hex()}" for name, s in states.items()]
        return describe_groups(self) + digests

    def _replicated(self) -> dict[str, list[Tensor]]:
        """Parameters, and the state kept of them where it comes from averaged gradients."""
        found = {}
        for param, name in self._parameter_names.items():
            state = self.state.get(param, {}) if self.compressor.sends == "gradient" else {}
            kept = [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
            found[name] = [param, *kept]
        return found

    def _restore(self, kept: dict[str, Any]) -> None:
        if self._engine is None and any(kept["memory"].values()):
            self._connect()
        if self._engine is not None:
            self._engine.restore(kept["memory"], kept["order"], kept["step"], kept.get("shared", {}))

    def _warn_of_slowdown(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() "
                "context if you use optimizer.synchronize() in your code.",
                stacklevel=4,
            )

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Watch every parameter that is trained and not watched yet."""
        for param in self._parameter_names:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _gradient_arrived(self, param: Tensor) -> None:
        if not (self._engine is not None and self._engine.in_flight):
            self._keep_up()
        engine = self._engine
        if engine is None:  # the only rank that is left after `rejoin`
            return
        self._synchronized = self._expects_step = self._is_void = False
        if self._accumulating:
            return
        if not engine.in_flight and getattr(self, "_join_config", None) is not None:
            torch.distributed.algorithms.Join.notify_join_context(self)  # type: ignore[arg-type]
        engine.arrived(param)

    def _hide_gradients(self, params: Iterable[Tensor]) -> None:
        """Leave torch's own step nothing to do with them: it passes over parameters without a gradient."""
        for param in params:
            self._hidden.append((param, param.grad))
            param.grad = None

    def _show_gradients(self) -> None:
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad

    # -- the update as what travels ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _local_update(self) -> None:
        """Replace every gradient by what the optimizer would add to its parameter, and leave the parameters.

        But for decoupled weight decay, which is the same on all ranks and need not travel.
        """
        held = [(param, param.detach().clone()) for param in self._parameter_names if param.grad is not None]
        if self._settings.sparse_as_dense and not isinstance(self, torch.optim.SparseAdam):
            for param, _ in held:
                param.grad = param.grad.to_dense() if param.grad is not None else None
        decays = [(group, group["weight_decay"]) for group in self.param_groups if _decays_apart(group)]
        try:
            for group, _ in decays:
                group["weight_decay"] = 0.0
            _Distributed.step(self)
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        for param, before in held:
            grad = param.grad
            if grad is None or grad.layout != torch.strided or grad.dtype != param.dtype:
                grad = torch.empty_like(param)
            param.grad = torch.sub(param, before, out=grad)
            param.copy_(before)

    def _take_update(self) -> None:
        """Add the combined update to the parameters, in place of the optimizer's own step."""
        for group in self.param_groups:
            kept = 1 - float(group["lr"]) * float(group["weight_decay"]) if _decays_apart(group) else 1.0
            for param in group["params"]:
                if param.grad is not None:
                    param.data.mul_(kept).add_(param.grad)

    # -- automatic mixed precision -----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `torch.amp.GradScaler.step` when it is about to look for Inf: the moment for all ranks to agree.

        If any rank has found NaN or Inf, every rank's scaler finds it too, skips the step and lowers its scale; or, if
        weights are averaged too (`dgcopt.averaging`), leaves it to that.
        """
        if self._engine is None:
            return bool(self.__dict__.get("_step_supports_amp_scaling", False))
        is_averaged = "averaging" in self.__dict__
        if self._accumulating and not self._synchronizing:  # between averages of weights nothing is agreed upon
            return is_averaged
        self._engine.hold()
        undecided = self._engine.in_flight and not self._synchronized
        if undecided and not self.comm.constructs_in_turn and self._engine.agree_on_overflow():
            self._engine.discard()
            self._is_void = self._synchronized = True
            self._engine.telemetry.skipped += 1
        if self._is_void:
            self._spoil_a_gradient()
        return is_averaged

    def _spoil_a_gradient(self) -> None:
        """Let this rank's scaler find what another rank's has found."""
        for param in self._parameter_names:
            if param.grad is not None:
                values = param.grad._values() if param.grad.is_sparse else param.grad
                if values.numel():
                    values[(0,) * values.dim()] = torch.nan
                    return

    # -- uneven data -------------------------------------------------------------------------------------------------

    def _shadow(self) -> bool:
        """Take one step with the ranks that still have data; False once there are none."""
        assert self._engine is not None
        self._engine.active = False
        self._synchronized = False
        self.synchronize()
        if self._engine.actives:
            self._step_without_data()
        return bool(self._engine.actives)

    def _step_without_data(self) -> None:
        assert self._engine is not None
        self._is_void = self._engine.void
        with self.skip_synchronize():
            self.step()

    def join_hook(self, **kwargs: Any) -> Any:
        """For `torch.distributed.algorithms.Join`: steps without data until every rank has run out of it.

        Averages divide by all ranks, or, as DDP's, with `Join(..., divide_by_initial_world_size=False)` by those that
        have data.
        """
        return _JoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """For `torch.distributed.algorithms.Join`: where its own collectives live."""
        return self.comm.to_wire(torch.zeros(1)).device

    @property
    def join_process_group(self) -> Any:
        """For `torch.distributed.algorithms.Join`. Raises ConfigError where the wire is not torch.distributed."""
        if not hasattr(self.comm, "process_group"):
            raise ConfigError(
                f"torch.distributed.algorithms.Join needs the wire torch, and this optimizer exchanges over "
                f"{self.comm.wire}: use dgcopt.join(optimizer), which works on every wire"
            )
        return self.comm.process_group

    # -- copies ------------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is the bare optimizer again: a wire cannot be stored."""
        # not copyreg.__newobj__, which pickle takes for the object's own class alone
        return object.__new__, (_bare_class(self),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A distributed optimizer of copied parameters; all ranks must copy alike."""
        base = _bare_class(self)
        twin: Any = base.__new__(base)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        params = [param for group in twin.param_groups for param in group["params"]]
        names = dict(zip(params, self._parameter_names.values(), strict=True))
        _wrap(twin, names, dict(names), copy.deepcopy(self.compressor), copy.copy(self._settings), self.comm)
        if self._engine is not None:
            twin._restore(self._engine.kept())
        return twin


class _JoinHook:
    """One optimizer's part in torch's Join; see `torch.distributed.algorithms.JoinHook`."""

    def __init__(self, optimizer: _Distributed, divide_by_all: bool) -> None:
        self.optimizer = optimizer
        if optimizer._engine is not None:
            optimizer._engine.divide_by_active = not divide_by_all

    def main_hook(self) -> None:
        self.optimizer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        if self.optimizer._engine is not None:
            self.optimizer._engine.all_have_data()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Average gradients, or let the closure do it; runs also where a scheduler kept the unwrapped `step`."""
    assert isinstance(optimizer, _Distributed)
    if optimizer._raw:
        return None
    has_self = bool(args) and args[0] is optimizer
    place = 1 if has_self else 0
    closure = args[place] if len(args) > place else kwargs.get("closure")
    if closure is None:
        if optimizer._synchronizing:
            if optimizer._synchronized and not optimizer._expects_step and not optimizer._is_void:
                optimizer._warn_of_slowdown()
            optimizer.synchronize()
        optimizer._synchronized = optimizer._expects_step = False
        _use_gradients(optimizer)
        return None
    optimizer._is_done = False
    averaged = functools.partial(_averaged_closure, optimizer, closure)
    if len(args) > place:
        return (*args[:place], averaged, *args[place + 1 :]), kwargs
    return args, {**kwargs, "closure": averaged}


def _averaged_closure(optimizer: _Distributed, closure: Callable[[], Any]) -> Any:
    """The closure, then the mean of its loss over ranks, so that line searches decide alike everywhere.

    If nothing is left to do then, the step that has called it is over, unless it has changed weights since it began.
    """
    if optimizer.compressor.sends == "update" and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"LBFGS looks at gradients more than once in a step, and {type(optimizer.compressor).__name__} sends the "
            f"updates made of them: choose a compressor that sends gradients (source='gradient')"
        )
    loss = closure()
    if optimizer._synchronizing:
        optimizer.synchronize()
        optimizer._synchronized = False
        engine = optimizer._engine
        if engine is not None and engine.actives < optimizer.comm.size:
            raise ConfigError("step(closure) does not work while ranks have run out of data: step() does")
        if isinstance(loss, Tensor | float | int):
            value = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(-1).clone()
            mean = optimizer.comm.run(AllReduce(optimizer.comm.to_wire(value), op="average", label="loss"))
            loss = mean.reshape(loss.shape).to(loss) if isinstance(loss, Tensor) else float(mean)
    _use_gradients(optimizer)
    if optimizer._is_done and optimizer._may_leave:
        raise _Done(loss)
    optimizer._may_leave = False
    return loss


class _Done(Exception):
    """The closure has left nothing to do for the step that called it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _use_gradients(optimizer: _Distributed) -> None:
    """What stands between the exchange and the optimizer's own step, which is not to be taken if that is done."""
    takes_update = optimizer._engine is not None and optimizer.compressor.sends == "update"
    optimizer._is_done = optimizer._is_void or takes_update
    if optimizer._is_done:
        if not optimizer._is_void:
            optimizer._take_update()
        optimizer._hide_gradients(optimizer._parameter_names)  # where its own step was bound before it was wrapped
    else:
        if isinstance(optimizer, torch.optim.SparseAdam):  # it takes no other gradients, also where they came densely
            for param in optimizer._parameter_names:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad = param.grad.to_sparse(1)
        optimizer._hide_gradients(optimizer.compressor.before_step(optimizer) or ())
        if _bare_class(optimizer) is torch.optim.SGD and optimizer._engine is not None:
            optimizer._hide_gradients(step_touched(optimizer, optimizer._engine.touched()))


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, _Distributed)
    if not optimizer._raw:
        optimizer._is_done = False
        optimizer._show_gradients()
        optimizer.compressor.after_step(optimizer)
        if optimizer._engine is not None:
            optimizer._engine.let_go()


def _save_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    assert isinstance(optimizer, _Distributed)
    optimizer._keep_up()
    root = broadcasting_root()
    if root is not None:
        # Horovod's knows nothing of what is kept here, and stands still if ranks keep different things for a parameter:
        # do its work, and leave it the settings
        broadcast_optimizer_state(optimizer, root)
        groups = [unmarked(group) for group in optimizer.state_dict()["param_groups"]]
        return {"state": {"sent": {}}, "param_groups": groups}
    engine = optimizer._engine
    if engine is not None:
        kept = engine.kept()
        state_dict[STATE_KEY] = {"rank": optimizer.comm.rank, "world_size": optimizer.comm.size, **kept}
        put_mark(state_dict, engine.step, kept["memory"])
    return None


def _load_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    assert isinstance(optimizer, _Distributed)
    optimizer._keep_up()
    rank, size = optimizer.comm.rank, optimizer.comm.size
    groups = state_dict["param_groups"]
    if STATE_KEY in state_dict:
        state = state_dict[STATE_KEY]
        if (state["rank"], state["world_size"]) in optimizer._formerly:
            state = {**state, "rank": rank, "world_size": size}
        optimizer._restore(own_part(state, rank, size))
    elif step := take_mark([dict(group) for group in groups], rank):
        optimizer._restore({"memory": {}, "order": [], "step": step})
    kept = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    return {**kept, "param_groups": [unmarked(group) for group in groups]}


@functools.cache
def _subclass(base: type[Optimizer]) -> type[Optimizer]:
    """The class that a wrapped `base` gets: the same name, with the methods above."""
    bare: Any = base.step
    if getattr(bare, "__code__", None) is _with_hooks(bare).__code__:
        bare = bare.__wrapped__

    @functools.wraps(bare)
    def between_hooks(self: _Distributed, *args: Any, **kwargs: Any) -> Any:
        return self._step_unless_done(*args, **kwargs)

    body = {"__doc__": base.__doc__, "__module__": base.__module__, "_bare_step": bare}
    return _ahead_of(type(base))(base.__name__, (base, _Distributed), {**body, "step": _with_hooks(between_hooks)})


def _ahead_of(kind: Any) -> Any:
    """A `kind` of class whose own methods give way to those of _Distributed, though it names `base` first.

    Python lets an object change to a class that has its memory laid out by the same first base. With _Distributed
    first, that fails for optimizers whose first base is none itself, such as `class Mine(ABC, Optimizer)`.
    """

    def mro(cls: Any) -> list[type]:
        first, *others = kind.mro(cls)
        return [first, _Distributed, *(other for other in others if other is not _Distributed)]

    return type(kind.__name__, (kind,), {"mro": mro})


def _with_hooks(step: Any) -> Any:
    """A step as torch makes it of the one that a class defines: with the hooks of the optimizer around it."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # so that torch does not do it again
    return hooked


def _bind_anew(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Let a scheduler that was made before, and has bound the old class's `step`, call that of `kind`, the new class.

    Raises ConfigError if something else was bound that may move weights in a step that no rank is to take.
    """
    bound, own = vars(optimizer).get("step"), type(optimizer).step
    # a newer torch names what its scheduler calls, an older one does not
    if hasattr(bound, "_wrapped_by_lr_sched") and getattr(bound, "__wrapped__", own) is own:
        reference = weakref.ref(optimizer)

        @functools.wraps(bound)  # type: ignore[arg-type]
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = reference()
            optimizer._opt_called = True  # all that the scheduler wants to know
            return kind.step(optimizer, *args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
    elif bound is not None and not passes_over_missing_gradients(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(
            f"this {name}'s `step` was replaced before the optimizer was wrapped, so that dgcopt cannot keep it from "
            f"moving weights where NaN or Inf make a step void: wrap the optimizer first, then replace its `step`"
        )


def _is_averaged_by_ddp(params: Iterable[Tensor]) -> bool:
    """Whether a DistributedDataParallel without a hook has averaged gradients of `params` over all processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    ours = set(params)
    for module in _instances(torch.nn.parallel.DistributedDataParallel):  # nothing leads from a parameter to its DDP
        size = torch.distributed.get_world_size(module.process_group)
        everyone = size == torch.distributed.get_world_size() > 1
        # False after a forward pass within DDP's no_sync()
        exchanges = getattr(module, "require_forward_param_sync", True) and not getattr(module, "_comm_hooks", [])
        if everyone and exchanges and not ours.isdisjoint(module.parameters()):
            return True
    return False


def _instances(kind: type[Any]) -> Iterator[Any]:
    """All living objects of a class and its subclasses: the garbage collector knows that each refers to its class."""
    yield from (each for each in gc.get_referrers(kind) if type(each) is kind)
    for subclass in kind.__subclasses__():
        yield from _instances(subclass)


def _decays_apart(group: dict[str, Any]) -> bool:
    """Whether weight decay is no part of what the group's optimizer makes of the gradient, as in AdamW."""
    return bool(group.get("decoupled_weight_decay")) and bool(group["weight_decay"])


def _bare_class(optimizer: _Distributed) -> type[Optimizer]:
    return type(optimizer).__mro__[2]
