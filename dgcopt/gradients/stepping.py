"""A step of a wrapped optimizer: its gradients are averaged before it, whoever calls it and however."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce
from ..comm import Comm
from ..compressors import Compressor
from ..errors import ConfigError
from ..exchange.vote import Touch
from ..flat.gradient import HiddenGradients, values_of
from .changes import Snapshot
from .closure import Call, Closure, closure_of, with_closure
from .engine import Engine
from .sparse_step import step_touched
from .subclass import bare_class
from .wrapped import Wrapped

__all__ = ["Mode", "Stepping", "after_step", "before_step", "between_hooks", "in_own_step"]


class Mode(Enum):
    """What backward passes and `step()` do with gradients."""

    EXCHANGE = "send what is complete, and average before the step"
    ADD_UP = "send nothing, and average before the step"
    AS_THEY_ARE = "step without averaging"
    LOCAL = "neither send nor average: ranks train by themselves"


class Grads(Enum):
    """What `param.grad` holds."""

    OWN = "this rank's own"
    MIXED = "the mean over ranks, and what was added to it since"
    AVERAGED = "the mean over ranks"
    FINAL = "the mean over ranks, as the step is to use it"
    VOID = "NaN or Inf on some rank, so that no rank takes the step"


NOT_YET = (Grads.OWN, Grads.MIXED)
"""What is yet to be averaged."""

SENDS_NOTHING = (Mode.ADD_UP, Mode.LOCAL)
"""In which backward passes only add up."""


class OwnStep(Enum):
    """Where the wrapped optimizer's own step is."""

    AHEAD = "yet to come"
    DONE = "not to be called, as nothing is left for it to do"
    BEGUN = "running, and has changed nothing"
    RUNNING = "running, and has seen gradients"


class Stepping(Optimizer):
    """What the class of a wrapped optimizer gains around its step; see `dgcopt.DistributedOptimizer`.

    Attributes: `comm`, the wire; `compressor`, how gradients travel; `engine`, their exchanges, None in a single
    process; `mode`, what is done with gradients; `parameter_names`, all parameters and their names.
    """

    comm: Comm
    compressor: Compressor
    engine: Engine | None = None
    wrapped: Wrapped
    parameter_names: dict[Tensor, str]
    mode: Mode = Mode.EXCHANGE
    bare_step: Callable[..., Any]
    _grads: Grads = Grads.OWN
    _own_step: OwnStep = OwnStep.AHEAD
    _hidden: HiddenGradients
    _averages: Snapshot | None
    _watched: set[Tensor]
    _warned: bool = False

    def _begin_anew(self) -> None:
        """No step is under way."""
        self._grads, self._own_step, self._hidden = Grads.OWN, OwnStep.AHEAD, HiddenGradients()
        self._averages = None

    def _keep_up(self) -> None:
        """Rejoin if the ranks that this optimizer was of are no more."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's own step, without any exchange or hook: `optimizer.step()` is the subclass's."""
        before, self._own_step = self._own_step, OwnStep.BEGUN
        try:
            return self.bare_step(*args, **kwargs)
        finally:
            self._own_step = before

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        if self._average():
            self._averages = Snapshot(param.grad for param in self.parameter_names)

    def _average(self) -> bool:
        """Average the gradients, unless they are averaged already; True if the step may then be taken."""
        if self.engine is not None and self._grads in NOT_YET:
            self._keep_up()
        if self.engine is None or self._grads not in NOT_YET:
            return False
        self._watch_parameters()
        self.engine.synchronize()
        self._grads = Grads.VOID if self.engine.void else Grads.AVERAGED
        return not self.engine.void

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step()` uses the gradients as they are, after `synchronize()` was called by hand."""
        with self._within(Mode.AS_THEY_ARE):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes only add up: nothing is sent, and no pass is counted."""
        with self._within(Mode.ADD_UP):
            yield

    @contextmanager
    def _within(self, mode: Mode) -> Iterator[None]:
        before = self.mode
        self.mode = before if before is Mode.LOCAL else mode
        try:
            yield
        finally:
            if self.mode is not Mode.LOCAL:  # as a warm-up may have ended within
                self.mode = before

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
        if self._grads is Grads.AVERAGED:
            self._grads = Grads.FINAL
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`. Gradients that are on their way are taken back, on all ranks."""
        if self.engine is not None:
            self.engine.discard()
            self._grads = Grads.OWN
        super().zero_grad(set_to_none=set_to_none)

    # -- gradients that come in --------------------------------------------------------------------------------------

    def _watch_parameters(self) -> None:
        """Watch every parameter that is trained and not watched yet."""
        if len(self._watched) == len(self.parameter_names):
            return
        for param in self.parameter_names:
            if param.requires_grad and param not in self._watched:
                self._watched.add(param)
                param.register_post_accumulate_grad_hook(self.gradient_arrived)

    def gradient_arrived(self, param: Tensor) -> None:
        """`param.grad` was added to; called by autograd, or by who makes gradients without it."""
        engine = self.engine
        is_first = engine is None or not engine.in_flight
        if is_first:
            self._keep_up()
            engine = self.engine
        if engine is None:  # the only rank that is left after `rejoin`
            return
        if self._grads not in NOT_YET:
            self._grads = Grads.OWN if self._grads is Grads.VOID else Grads.MIXED
        if self.mode in SENDS_NOTHING:
            engine.added(param)
            return
        if is_first and getattr(self, "_join_config", None) is not None:
            torch.distributed.algorithms.Join.notify_join_context(self)  # type: ignore[arg-type]
        engine.arrived(param)

    def _step_without_data(self) -> None:
        """The step of a rank that has run out of data, after the others' gradients were averaged without it.

        Its loop, which has ended, sets no gradient to zero any more: none may be left to be added to in the next one.
        """
        assert self.engine is not None
        self._grads = Grads.VOID if self.engine.void else Grads.FINAL
        with self.skip_synchronize():
            self.step()
        super().zero_grad()

    # -- automatic mixed precision -----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `torch.amp.GradScaler.step` when it is about to look for Inf: the moment for all ranks to agree.

        If any rank has found NaN or Inf, every rank's scaler finds it too, skips the step and lowers its scale; or, if
        weights are averaged too (`dgcopt.averaging`), leaves it to that.
        """
        if self.engine is None:
            return bool(self.__dict__.get("_step_supports_amp_scaling", False))
        is_averaged = "averaging" in self.__dict__
        if self.mode is Mode.LOCAL:  # between averages of weights nothing is agreed upon
            return is_averaged
        self.engine.hold()
        if self.engine.in_flight and self._grads in NOT_YET and self.engine.agree_on_overflow():
            self.engine.discard()
            self.engine.void = True
            self._grads = Grads.VOID
            self.engine.telemetry.skipped += 1
        if self._grads is Grads.VOID:
            self._spoil_a_gradient()
        return is_averaged

    def _spoil_a_gradient(self) -> None:
        """Let this rank's scaler find what another rank's has found."""
        for param in self.parameter_names:
            values = values_of(param.grad) if param.grad is not None else torch.empty(0)
            if values.numel():
                values[(0,) * values.dim()] = torch.nan
                return

    # -- what the hooks around a step do -----------------------------------------------------------------------------

    def _average_before_step(self) -> None:
        """Before a step without a closure."""
        if self.mode in (Mode.EXCHANGE, Mode.ADD_UP) and not self._makes_state_only():
            if self._grads is Grads.AVERAGED and not self._warned:
                self._warned = True
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=4,
                )
            self._average()
        self._own_step = OwnStep.DONE if self._use_gradients() else OwnStep.AHEAD

    def _makes_state_only(self) -> bool:
        """Whether `torch.distributed.checkpoint` calls this step, for an optimizer to make its state.

        Gradients are zeros then that no backward pass has made, and lr is 0: an exchange would waste what is held back.
        """
        engine = self.engine
        if engine is None or engine.step == 0 or engine.in_flight or self._grads is not Grads.OWN:
            return False
        if any(float(group.get("lr", 0.0)) != 0 for group in self.param_groups):
            return False
        grads = [param.grad for param in self.parameter_names if param.requires_grad]
        return all(grad is not None and not values_of(grad).any() for grad in grads)

    def _averaged_closure(self, closure: Closure) -> Any:
        """The closure, then the mean of its loss over ranks, so that line searches decide alike everywhere.

        If nothing is left to do then, the step that has called it is over, unless it has changed weights already.
        """
        if self.compressor.sends == "update" and isinstance(self, torch.optim.LBFGS):
            raise ConfigError(
                f"LBFGS looks at gradients more than once in a step, and {type(self.compressor).__name__} sends the "
                f"updates made of them: choose a compressor that sends gradients (source='gradient')"
            )
        loss = closure()
        if self.mode in (Mode.EXCHANGE, Mode.ADD_UP):
            self._average()
            if self.engine is not None and self.engine.attendance.ranks < self.comm.size:
                raise ConfigError("step(closure) does not work while ranks have run out of data: step() does")
            if isinstance(loss, Tensor | float | int):
                value = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(-1).clone()
                mean = self.comm.run(AllReduce(self.comm.to_wire(value), op="average", label="loss"))
                loss = mean.reshape(loss.shape).to(loss) if isinstance(loss, Tensor) else float(mean)
        if self._use_gradients() and self._own_step is OwnStep.BEGUN:
            raise _Done(loss)
        self._own_step = OwnStep.RUNNING
        return loss

    def _use_gradients(self) -> bool:
        """What stands between the exchange and the optimizer's own step; returns whether that is done by now.

        Nothing, if there was no exchange: that step is the optimizer's own, of this rank's gradients.
        """
        grads, self._grads = self._grads, Grads.OWN
        if grads is Grads.OWN:
            return False
        averages, self._averages = self._averages, None
        if self.engine is not None and grads in (Grads.AVERAGED, Grads.FINAL):
            has_changed = averages is not None and averages.has_changed(param.grad for param in self.parameter_names)
            touched = Touch.CHANGED if has_changed else Touch.KEPT
            self.engine.touched = touched if self.engine.attendance.here else Touch.UNKNOWN
        is_void = grads is Grads.VOID
        takes_update = self.engine is not None and self.compressor.sends == "update"
        if is_void or takes_update:
            # for a step of its own that was bound before it was wrapped, or that has others left to do
            self._hidden.hide(self.parameter_names if is_void else self.wrapped.take_update())
            if all(param.grad is None for param in self.parameter_names):
                return True
        if isinstance(self, torch.optim.SparseAdam):  # it takes no other gradients, also where they came densely
            for param in self.parameter_names:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad = param.grad.to_sparse(1)
        self._hidden.hide(self.compressor.before_step(self) or ())
        if bare_class(self) is torch.optim.SGD and self.engine is not None:
            self._hidden.hide(step_touched(self, self.engine.layout.touched()))
        return False

    def _step_unless_done(self, *args: Any, **kwargs: Any) -> Any:
        """What happens between the hooks of a step: the optimizer's own one, where that is left to do."""
        if self._own_step is OwnStep.DONE:
            return None
        try:
            return Stepping.step(self, *args, **kwargs)
        except _Done as done:
            return done.loss
        except Exception:  # after which torch runs no hooks
            self._end_step()
            raise

    def _end_step(self) -> None:
        """After a step: gradients are seen again, and nothing is kept of them."""
        self._own_step = OwnStep.AHEAD
        self._hidden.show()
        self.compressor.after_step(self)
        if self.engine is not None:
            self.engine.layout.let_go()


class _Done(Exception):
    """The closure has left nothing to do for the step that called it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def in_own_step(optimizer: Optimizer) -> bool:
    """Whether the wrapped optimizer's own step is running, in which hooks of its step have nothing to do."""
    return isinstance(optimizer, Stepping) and optimizer._own_step in (OwnStep.BEGUN, OwnStep.RUNNING)


def between_hooks(optimizer: Stepping, bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """See `become`."""
    return optimizer._step_unless_done(*args, **kwargs)


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Average gradients, or let the closure do it; runs also where a scheduler kept the unwrapped `step`."""
    assert isinstance(optimizer, Stepping)
    if in_own_step(optimizer):
        return None
    closure = closure_of(args, kwargs)
    if closure is None:
        optimizer._average_before_step()
        return None
    optimizer._own_step = OwnStep.AHEAD
    return with_closure(args, kwargs, functools.partial(optimizer._averaged_closure, closure))


def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs after every step but the optimizer's own."""
    assert isinstance(optimizer, Stepping)
    if not in_own_step(optimizer):
        optimizer._end_step()
