"""Steps of a wrapped optimizer: gradients are averaged before each, whoever calls `step()`."""

from __future__ import annotations

import functools
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce, Exchange
from ..comm import Comm
from ..compressors import Adasum, Compressor
from ..errors import ConfigError
from ..exchange.buffers import Buffers
from ..exchange.changes import Snapshot
from ..exchange.held import held
from ..exchange.untraced import untraced
from ..exchange.vote import Touch
from ..flat.gradient import values_of
from ..flat.local_shard import LocalShard
from .engine import Engine
from .step_hooks import Call, Closure, check_arguments, with_closure
from .subclass import Step, bare_step
from .wrapped import Wrapped

Of = TypeVar("Of")

__all__ = ["NOT_YET", "Grads", "Mode", "Stepping", "after_step", "before_step", "step_of", "stepping_of"]

log = logging.getLogger("dgcopt")


class Mode(Enum):
    """The treatment of gradients by backward passes and `step()`."""

    EXCHANGE = "send complete buckets, and average before the step"
    ADD_UP = "send nothing, and average before the step"
    AS_THEY_ARE = "step without averaging"
    LOCAL = "neither send nor average: ranks train by themselves"


class Grads(Enum):
    """The meaning of `param.grad`."""

    OWN = "this rank's own"
    MIXED = "the mean over ranks, and later additions"
    AVERAGED = "the mean over ranks"
    FINAL = "the mean over ranks, as the step is to use it"
    VOID = "NaN or Inf on some rank, so that no rank takes the step"


NOT_YET = (Grads.OWN, Grads.MIXED)
"""Gradients still to be averaged."""

SENDS_NOTHING = (Mode.ADD_UP, Mode.LOCAL)
"""Modes in which backward passes only add up."""


class OwnStep(Enum):
    """Progress of the wrapped optimizer's own step."""

    AHEAD = "yet to come"
    DONE = "not to be called, as nothing is left for it to do"
    BEGUN = "running, and has changed nothing"
    RUNNING = "running, and has seen gradients"


class Stepping:
    """The steps of one wrapped optimizer; see `dgcopt.DistributedOptimizer`.

    Attributes:
        optimizer: the user's optimizer.
        comm: the wire.
        compressor: the compressor of gradients.
        engine: the exchanges of gradients; None in a single process.
        mode: the treatment of gradients.
        grads: the meaning of `param.grad`.
        saw_backward: True if autograd has told of gradients since the last step.
        names: every parameter and its name.
    """

    comm: Comm

    def __init__(self, optimizer: Optimizer, names: dict[Tensor, str], compressor: Compressor) -> None:
        self.optimizer = optimizer
        self.compressor = compressor
        self.names = names
        self._bare_step = bare_step(optimizer)
        on_end = (self._committed, self.skip, self._failed)
        self.wrapped = Wrapped(
            optimizer, names, compressor, self.own_step, self._step_without_data, *on_end, self.follow_groups
        )
        self.engine: Engine | None = None
        self.mode = Mode.EXCHANGE
        self._watched: set[Tensor] = set()
        self._stepped: list[Tensor] = []
        self._warned = False
        self._uses_gradients = False  # True if the step in progress uses exchanged gradients
        self.saw_backward = False
        self.begin_anew()

    def sync_buffers(self, buffers: Buffers) -> None:
        """Synchronise buffers of the model in each step from now on."""
        self.wrapped.sync_buffers(buffers)

    def serving(self, throws: bool) -> Sequence[Engine]:
        """Return the engine, which serves ranks with data, if there are several ranks; see `dgcopt.join`."""
        if any(isinstance(part, Adasum) for part in self.compressor.parts()):
            raise ConfigError("join does not work with Adasum, for which a rank without data has no neutral update")
        return [self.engine] if self.engine is not None else []

    def begin_anew(self) -> None:
        """Reset: no step is in progress."""
        self.grads, self._own_step = Grads.OWN, OwnStep.AHEAD
        self.wrapped.begin_anew()
        self._averages: Snapshot | None = None
        self._skipped: dict[Tensor, weakref.ref[Tensor]] = {}

    def follow_groups(self) -> None:
        """Take in parameters that were put into `param_groups` by hand.

        Raises ConfigError for parameters that were removed, and for new ones that would have the names of others.
        """
        stepped = [param for group in self.optimizer.param_groups for param in group["params"]]
        if len(stepped) != len(self._stepped) or not all(map(operator.is_, stepped, self._stepped)):
            self.take_in_new()
            self._stepped = stepped

    def begin_step(self) -> None:
        """Prepare for the first gradient of a step."""
        if self.comm.survives or self.comm.is_void():
            self.follow_ranks()

    def exchange(self, act: Callable[[Engine], Of]) -> Of | None:
        """Let the engine exchange something; after a loss, again with the ranks that are left.

        Returns None if the step has been committed by the time of the loss, and so is over.
        """
        assert self.engine is not None
        return self.exchange_again(act) if self.comm.survives else act(self.engine)

    # -- parameters and ranks that change, by the subclass -----------------------------------------------------------

    def take_in_new(self) -> None:
        """Exchange the parameters that are new in the optimizer's groups."""
        raise NotImplementedError

    def follow_ranks(self) -> None:
        """Continue among the current ranks."""
        raise NotImplementedError

    def exchange_again(self, act: Callable[[Engine], Of]) -> Of | None:
        """Exchange as `exchange` does, where ranks may be lost."""
        raise NotImplementedError

    def copy_residual(self) -> None:
        """Copy this rank's residual to another rank if that is due."""
        raise NotImplementedError

    def own_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped optimizer's own step, without exchange or hooks: `optimizer.step()` is the subclass's."""
        before = self._own_step
        try:
            self._own_step = OwnStep.BEGUN
            return self._bare_step(self.optimizer, *args, **kwargs)
        finally:
            self._own_step = before

    @property
    def in_own_step(self) -> bool:
        """True while the optimizer's own step runs; hooks of its step then do nothing."""
        return self._own_step in (OwnStep.BEGUN, OwnStep.RUNNING)

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        if self.engine is not None:
            self.engine.gradients.wait_for_vote_if_unscaled()
        if self._average():
            self._averages = Snapshot(param.grad for param in self.names)

    def _average(self) -> bool:
        """Average the gradients, unless they are averaged already; return True if the step may then be taken."""
        if self.engine is not None and self.grads in NOT_YET:
            self.begin_step()
        if self.engine is None or not (self.grads in NOT_YET or self.engine.pending):
            return False
        self.watch_parameters()
        for param in self.names:
            if param.__class__ is LocalShard:  # no call for each parameter
                param.follow()
        self.exchange(Engine.synchronize)
        return not self.engine.gradients.void

    def _committed(self) -> None:
        """Note a commit, at its very moment, so that no exception comes between."""
        self.grads = Grads.AVERAGED
        self.wrapped.count_exchanged()

    def skip(self) -> None:
        """Skip the step. Its gradients are this rank's own, and no later step may use them unaveraged."""
        self.grads = Grads.VOID
        graded = [(param, param.grad) for param in self.names if param.grad is not None]
        self._skipped = {param: weakref.ref(grad) for param, grad in graded}

    def _pop_skipped(self, exchanged: Iterable[Tensor]) -> list[Tensor]:
        """Return parameters, frozen since a skipped step, that still have its gradient; release those `exchanged`."""
        for param in exchanged:
            self._skipped.pop(param, None)
        return [param for param, grad in self._skipped.items() if param.grad is not None and param.grad is grad()]

    def _failed(self) -> None:
        """Note a failed exchange."""
        self._own_step = OwnStep.AHEAD

    @contextmanager
    def within(self, mode: Mode) -> Iterator[None]:
        """Context with another mode; a rank that trains alone keeps its own."""
        before = self.mode
        self.mode = before if before is Mode.LOCAL else mode
        try:
            yield
        finally:
            if self.mode is not Mode.LOCAL:  # a warm-up may have ended in the context
                self.mode = before

    def switch(self, mode: Mode) -> None:
        """Switch to another mode."""
        self.mode = mode

    def renew(self) -> None:
        """Take the gradients for this rank's own, set by hand after a skipped step."""
        self.grads = Grads.OWN

    def fix(self) -> None:
        """Average the gradients for the next step; later changes cause no warning."""
        self.synchronize()
        if self.grads is Grads.AVERAGED:
            self.grads = Grads.FINAL

    def cancel(self) -> None:
        """Cancel in-flight gradients, on all ranks, because gradients are set to zero."""
        if self.engine is not None:
            self.engine.gradients.cleared()
            self.grads, self._skipped = Grads.OWN, {}

    # -- gradients that come in --------------------------------------------------------------------------------------

    def watch_parameters(self) -> None:
        """Watch every parameter that is not watched yet, also those frozen until a later backward pass."""
        if len(self._watched) == len(self.names):
            return
        for param in self.names:
            if param not in self._watched and param.is_floating_point() and not param.is_inference():
                self._watched.add(param)
                is_frozen = not param.requires_grad
                param.requires_grad = True  # torch registers no hook of a frozen one
                handle = param.register_post_accumulate_grad_hook(self._tell)
                param.requires_grad = not is_frozen
                weakref.finalize(self, handle.remove).atexit = False

    @functools.cached_property
    def _tell(self) -> Callable[[Tensor], None]:
        """The hook of each parameter: one function, as every call costs time for each gradient.

        Parameters keep it in C++, where gc does not see that it leads back here, so it holds a weak reference.
        """
        reference = weakref.ref(self)

        def tell(param: Tensor) -> None:
            if torch.compiler.is_dynamo_compiling():
                tell_untraced(param)
                return
            steps = reference()
            if steps is None:
                return
            with steps.engine.turns.lock if steps.engine is not None else nullcontext():
                engine = steps.engine
                is_first = engine is None or not engine.in_flight
                if is_first:
                    steps.saw_backward = True
                    steps.begin_step()
                    engine = steps.engine
                if engine is None:  # the only rank that is left after `rejoin`
                    return
                if steps.grads not in NOT_YET:
                    steps.grads = Grads.OWN if steps.grads is Grads.VOID else Grads.MIXED
                if steps.mode in SENDS_NOTHING:
                    engine.added(param)
                    return
                if is_first and getattr(steps.optimizer, "_join_config", None) is not None:
                    torch.distributed.algorithms.Join.notify_join_context(steps.optimizer)  # type: ignore[arg-type]
                engine.arrived(param)

        tell_untraced = untraced(tell)  # called only while tracing, as it takes ten calls for each gradient
        return tell

    def gradient_arrived(self, param: Tensor) -> None:
        """Take in `param.grad` after an addition; called by autograd, or by code that makes gradients without it."""
        self._tell(param)

    def _step_without_data(self) -> None:
        """Take the step of a rank without data, after the others have averaged their gradients.

        Its loop has ended and zeroes no gradients, so this does: the next loop would add to them. Other ranks step
        frozen parameters that keep a gradient.
        """
        assert self.engine is not None
        self.grads = Grads.VOID if self.engine.gradients.void else Grads.FINAL
        with self.within(Mode.AS_THEY_ARE):
            self.optimizer.step()
        keeps_frozen = any(not param.requires_grad and param.grad is not None for param in self.names)
        self.optimizer.zero_grad(set_to_none=not keeps_frozen)

    # -- the hooks around a step -------------------------------------------------------------------------------------

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Average gradients, or return arguments whose closure does it."""
        self.check_whole()
        self._own_step = OwnStep.AHEAD
        if len(args) > 1 or kwargs:
            if self.engine is not None and self.mode in (Mode.EXCHANGE, Mode.ADD_UP):
                check_arguments(args, kwargs, self.comm.rank)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if callable(closure):
                return with_closure(args, kwargs, functools.partial(self.run_closure, closure))
        self.prepare_step()
        return None

    def prepare_step(self) -> None:
        """Average the gradients and use them in a step without a closure."""
        try:
            self._average_before_step()
            self._own_step = OwnStep.DONE if self._use_gradients() else OwnStep.AHEAD
        except BaseException:  # torch calls neither the step nor further hooks after this
            self.end_step(failed=True)
            raise

    def _average_before_step(self) -> None:
        if self.mode in (Mode.EXCHANGE, Mode.ADD_UP) and not self._makes_state_only():
            by_hand = self.engine is not None and not self.engine.pending
            if self.grads is Grads.AVERAGED and by_hand and not self._warned:
                self._warned = True
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=7,  # of the line that called `step`, past the hooks of torch and the compiler's wrapper
                )
            self._average()

    def _makes_state_only(self) -> bool:
        """True if `torch.distributed.checkpoint` calls this step, for an optimizer to make its state.

        Gradients are zeros then, not of a backward pass, and lr is 0: an exchange would waste residuals.
        """
        engine = self.engine
        if engine is None or engine.step == 0 or engine.in_flight or self.grads is not Grads.OWN:
            return False
        if engine.gradients.tracker.uncounted:  # by passes inside no_sync()
            return False
        if any(float(group.get("lr", 0.0)) != 0 for group in self.optimizer.param_groups):
            return False
        grads = [param.grad for param in self.names if param.requires_grad]
        return all(grad is not None and not values_of(grad).any() for grad in grads)

    def run_closure(self, closure: Closure) -> Any:
        """Run the closure and return the mean of its loss over ranks, so that line searches decide alike everywhere.

        If nothing is left to do then, the step that has called it is over, unless it has changed weights already.
        """
        if self.compressor.sends == "update" and isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"LBFGS looks at gradients more than once in a step, and {type(self.compressor).__name__} sends the "
                f"updates made of them: choose a compressor that sends gradients (source='gradient')"
            )
        if self.comm.survives:
            raise ConfigError(
                "step(closure) does not work with dgcopt.init(survive=True): call step() after backward()"
            )
        loss = closure()
        if self.mode in (Mode.EXCHANGE, Mode.ADD_UP):
            self._average()
            if self.engine is not None and self.engine.participation.ranks < self.comm.size:
                raise ConfigError("step(closure) does not work while ranks have run out of data: use step()")
            # a rank whose closure returns no loss takes part as well: the others wait for it
            is_loss = isinstance(loss, float | int) or (isinstance(loss, Tensor) and loss.numel() == 1)
            value = torch.as_tensor(loss if is_loss else 0.0, dtype=torch.float64).detach().reshape(1)
            pair = torch.cat([value, torch.full_like(value, is_loss)])
            if self.engine is not None:
                scheduler = self.engine.runner.scheduler
                pair = scheduler.drive(scheduler.through(_total_loss(self.comm.to_wire(pair), self.comm)))
            if is_loss:
                mean = pair[0] / pair[1]
                loss = mean.reshape(loss.shape).to(loss) if isinstance(loss, Tensor) else float(mean)
        is_done = self._use_gradients()
        self.wrapped.commit.end()  # the next evaluation exchanges again
        if is_done and self._own_step is OwnStep.BEGUN:
            raise _Done(loss)
        self._own_step = OwnStep.RUNNING
        return loss

    def _use_gradients(self) -> bool:
        """Prepare the optimizer's own step after an exchange; return True if nothing is left for it to do.

        Without an exchange it steps on this rank's gradients, and nothing is prepared. Otherwise, until
        the own step has ended, an exception leaves this rank between two steps.
        """
        engine, grads, averages = self.engine, self.grads, self._averages
        if grads is Grads.OWN or engine is None:
            return False
        if grads in (Grads.AVERAGED, Grads.FINAL):
            has_changed = averages is not None and averages.has_changed(param.grad for param in self.names)
            engine.gradients.mark_touched(Touch.CHANGED if has_changed else Touch.KEPT)
        if grads is not Grads.VOID:
            self.wrapped.commit.begin("weights")
        self.grads, self._averages, self._uses_gradients = Grads.OWN, None, True
        if grads is Grads.VOID:
            self.wrapped.skip_step()
            return True
        skipped = self._pop_skipped(engine.layout.trained) if self._skipped else ()
        return self.wrapped.prepare_step(engine.layout, skipped)

    def step_unless_done(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own step between its hooks, unless nothing is left for it to do."""
        if self._own_step is OwnStep.DONE:
            return None
        try:
            result = self.own_step(*args, **kwargs)
        except _Done as done:
            return done.loss
        except BaseException as error:  # torch runs no further hooks after this
            self.end_step(failed=True)
            if "does not require grad and does not have a grad_fn" in str(error):
                raise ConfigError(
                    f"{type(self.optimizer).__name__}.step() differentiates gradients, as AdaHessian does after "
                    f"backward(create_graph=True), and averaged gradients have no graph. Such optimizers are not "
                    f"supported: use one that only reads gradients"
                ) from error
            raise
        self.wrapped.commit.end()
        return result

    def check_whole(self) -> None:
        """Raise InterruptedStep if memory, gradients and weights do not belong to the same step."""
        if self.engine is None or not self.engine.pending:
            self.wrapped.commit.check(self.comm.rank)

    def end_step(self, failed: bool = False) -> None:
        """Restore hidden gradients after a step, and release their memory."""
        self._own_step = OwnStep.AHEAD
        self.saw_backward = False
        self.wrapped.end_step()
        if self.engine is not None:
            self.engine.layout.release_gradients()
        if not failed and self._uses_gradients:
            self.wrapped.count_taken()
            self.wrapped.commit.end()
        self._uses_gradients = False
        if self.comm.copy_every and not failed:
            self.copy_residual()


def _total_loss(pair: Tensor, comm: Comm) -> Exchange:
    """Return the sums over all ranks of losses, and of the ranks that have one."""
    pair = yield AllReduce(pair, op="sum", label="loss")
    if comm.size_of("replica") > 1:  # ranks of one replica have different data
        pair = yield AllReduce(pair, op="sum", group="replica", label="loss over shards")
    return pair


class _Done(Exception):
    """Raised by a closure that leaves the step nothing to do."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def step_of(bare: Step) -> Step:
    """Return the step of an optimizer whose `bare` one is run by `Stepping`; see `become`."""

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return stepping_of(optimizer).step_unless_done(*args, **kwargs)

    return step


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Average gradients, or have the closure do it; runs even if a scheduler kept the unwrapped `step`."""
    steps = stepping_of(optimizer)
    return None if steps.in_own_step else steps.before_step(args, kwargs)


def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Finish every step but the optimizer's own."""
    steps = stepping_of(optimizer)
    if not steps.in_own_step:
        steps.end_step()


def stepping_of(optimizer: Optimizer) -> Stepping:
    """Return the steps of an optimizer that DistributedOptimizer has wrapped."""
    steps = held(optimizer).gradients
    assert isinstance(steps, Stepping)
    return steps
