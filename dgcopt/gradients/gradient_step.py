"""A step of one optimizer's gradients on one rank: its ballot, agreement with other ranks, and results.

The first step launches nothing early. Its gradients show in which order they become ready and which are sparse; the
ranks agree on rank 0's order and lay out buckets by it. The same happens when other parameters are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllReduce, Collective, Group
from ..comm import Handle
from ..compressors.tuner import Change
from ..errors import ConfigError, MismatchError
from ..exchange.agreement import SAME_MODEL, compare
from ..exchange.changes import Changes
from ..exchange.commit import FinishedExchange
from ..exchange.divergence import replicas
from ..exchange.group_settings import GroupSettings
from ..exchange.parameters import check_trainable
from ..exchange.runner import Job
from ..exchange.scheduler import CollectiveScheduler, PendingExchange
from ..exchange.step import Aborted, Description, Step
from ..exchange.turns import Turns, turns_over
from ..exchange.vote import Ballot, Touch, Verdict, checksum, fingerprint, plain
from ..flat.local_shard import LocalShard
from ..flat.memory import at_least_float32
from ..flat.store import Store
from .introspection import is_sharded_elsewhere
from .layout import Layout, bucket_sizes, lay_out
from .outgoing import OutgoingBuckets
from .replicas import check_shards
from .settings import Settings
from .tracker import EarlyLaunch, GradientTracker
from .wrapped import Wrapped

__all__ = ["GradientStep"]

log = logging.getLogger("dgcopt")

REMEDY = (
    f"{SAME_MODEL} If only one rank has loaded state, call dgcopt.broadcast_optimizer_state(optimizer, root_rank=0) "
    f"before the first step."
)

CHANGED = (
    f"{SAME_MODEL} A compressor of your own keeps memory in its context (ctx.memory.remember, ctx.keep_residual), not "
    f"in attributes, by which ranks compare settings."
)

FROZEN = (
    f"Freeze parameters on all ranks alike, before backward() or after step(): a parameter that is frozen in "
    f"between is exchanged only by ranks that have a gradient of it. {CHANGED}"
)

FREED = (
    "An optimizer was dropped, and garbage collection has freed it on some ranks only, while others sent its gradients "
    "during backward. After an optimizer is dropped, call gc.collect() on every rank."
)


class GradientStep(Step):
    """The step of all gradients of a wrapped optimizer.

    Args:
        wrapped: the optimizer and its parameters.
        settings: how gradients are exchanged.
        scheduler: starts collectives.

    Attributes:
        void: True if no rank takes the last step.
        infinite: the ranks whose gradients were not finite then.
        early: tells whether buckets may be launched before the vote.
        tracker: this step's gradients.
        outgoing: their buckets.
        store: memory by parameter name.
        turns: the order of the optimizers that share the wire.
    """

    def __init__(self, wrapped: Wrapped, settings: Settings, scheduler: CollectiveScheduler) -> None:
        super().__init__(scheduler, wrapped.commit)
        self.wrapped = wrapped
        self.names = wrapped.names
        self.compressor = wrapped.compressor
        self.settings = settings
        self.void = False
        self.infinite: Sequence[int] = []
        self.early = EarlyLaunch()
        self.turns: Turns[GradientStep] = turns_over(self.comm)
        self.turns.share(self)
        self.store = Store()
        self.tracker = GradientTracker()
        self.outgoing = OutgoingBuckets(wrapped, settings, self.participation, self.tracker, scheduler)
        self._flushes = False
        self._change: Change | None = None
        self._mean_momenta: dict[str, Tensor] | None = None  # by name, from the final exchange to its step
        self._is_due = False  # True once no unsent memory delays the change
        self._begun = False
        self._sparse: set[Tensor] = set()
        self._rule = ""  # the compressor's settings in the last step
        self._compared: tuple[object, ...] = ()
        self._checksum = 0
        self._warned = False
        self._groups = GroupSettings(wrapped.optimizer, settings.may_differ)
        self._changes = Changes(self.comm.rank, settings.on_divergence)
        self._touched = Touch.UNKNOWN

    # -- between steps -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepare for the first gradient of a step; launch nothing early if settings or parameters have changed.

        If settings have changed on some ranks only, the vote must find out before messages differ.
        """
        self.marker.check(self.comm.rank)
        before, self._rule = self._rule, repr(self.compressor)
        layout = self.outgoing.layout
        fits = not layout.launches_early or layout.fits(self._trained(), self._sparse)
        fits = fits and not self._is_due
        self.outgoing.mark_outdated(before != self._rule or not fits)

    @property
    def may_launch_early(self) -> bool:
        """True if this optimizer's step is the next one on its wire, and buckets may be launched before the vote."""
        if self.comm.survives:  # a loss must fail the step, which is repeated, not backward
            return False
        is_next = not self.turns.are_shared or self.turns.is_next(self)
        return is_next and self.early.may(self.outgoing.step)

    def mark_touched(self, touch: Touch) -> None:
        """Record whether the user has changed averaged gradients before the optimizer's step."""
        self._touched = touch if self.participation.here else Touch.UNKNOWN

    def flush_next(self, flushes: bool) -> None:
        """Set whether the next step is the final one with an exchange, which flushes the residuals."""
        self._flushes = flushes

    def inspect_sums(self) -> None:
        """Look for NaN and Inf in dense sums too, which costs one more pass over them."""
        self.inspects_sums = True

    def cleared(self) -> None:
        """Restart the step, as gradients are set to zero; launched exchanges are cancelled at the next step."""
        if self.outgoing.launched:
            self.outgoing.mark_stale()
            self.early.was_mistaken(self.outgoing.step)
        self.tracker.clear_passes()
        self.outgoing.layout.release_gradients()

    def wait_for_vote(self) -> None:
        """Launch nothing before the vote from now on, because gradients are scaled until then."""
        self.early.stop()
        if self.outgoing.launched:
            self.outgoing.mark_stale()  # unscaling gradients does not count as a change

    def wait_for_vote_if_unscaled(self) -> None:
        """Launch nothing before the vote from now on; relaunch exchanges of gradients unscaled since their launch."""
        if self.outgoing.launched and self.tracker.is_rescaled():
            self.wait_for_vote()

    def average_last_momentum(self) -> Job:
        """Average the momentum taken over by the compressor, after the final exchange."""
        if self._flushes:
            yield from self._average_momentum()

    def end_exchanges(self) -> None:
        """Return the momentum taken over by the compressor to the optimizer: no exchange follows."""
        momenta = self._mean_momenta
        if momenta is None:  # a rank was lost before the mean arrived
            momenta = self.store.memory().get("momentum", {})
        gain, self._mean_momenta = self._momentum_gain, None
        self.compressor.return_momentum({p: momenta[n] * gain for p, n in self.names.items() if n in momenta})
        self.replace_layout(self.outgoing.layout.order)
        self.store.drop("momentum")

    @property
    def _momentum_gain(self) -> float:
        """Factor from the mean of ranks' momenta to the optimizer's, whose gradients are summed, or predivided."""
        return self.comm.size if self.settings.op == "sum" else self.settings.gradient_predivide_factor

    @property
    def changes_compressor(self) -> bool:
        """True if the compressor is about to change."""
        return self._change is not None

    def change_compressor(self, change: Change) -> None:
        """Change the compressor in the next step, or in the one after, if the next one must flush the residuals.

        The optimizer has yet to take the step that was committed, with the compressor of that step.
        """
        self._change, self._is_due = change, change.keeps_residual

    def _make_change(self) -> Job:
        """Replace the compressor before a new layout of buckets, which adopts the unsent memory."""
        change, order = self._change, self.outgoing.layout.order
        assert change is not None
        self.replace_layout(order)
        if not change.keeps_residual:
            yield from self._average_momentum()
            self.end_exchanges()
        self.store.drop_all_but_unsent(() if not change.keeps_residual else ("momentum",))
        change.apply()
        self._change, self._is_due = None, False

    def _average_momentum(self) -> Job:
        """Compute the mean momentum over the ranks that hold some: the optimizer's state must be equal on all."""
        momenta = self.store.memory().get("momentum", {})
        means: dict[str, Tensor] = {}
        held = torch.tensor([name in momenta for name in self.names.values()], dtype=torch.int32)
        through = self.scheduler.through
        counts = (yield from through(_sum_of(held, "control", "who holds momentum"))).tolist()
        for (param, name), count in zip(self.names.items(), counts, strict=True):
            if count:
                mine, dtype = momenta.get(name), at_least_float32(param.dtype)
                mine = torch.zeros_like(param, dtype=dtype) if mine is None else mine.to(dtype)  # u may be bfloat16
                total = yield from through(_sum_of(mine.contiguous(), "world", f"momentum of {name}"))
                means[name] = total / count
        self._mean_momenta = means

    def skip(self) -> None:
        """Skip a step with an overflow found by the ranks' scalers."""
        self.void = True
        self.scheduler.telemetry.count_skipped()

    def replace_layout(self, order: Sequence[str]) -> None:
        """Move memory to the store, and lay out buckets by `order` at the next step."""
        self.store.release()
        self.outgoing.adopt(Layout(order=order))

    def restore(self, state: dict[str, Any]) -> None:
        """Restore memory and the number of steps. Raises ConfigError if memory does not fit the parameters."""
        self.store.restore(state, {name: param.shape for param, name in self.names.items()})
        self.tracker.clear()
        self._change, self._is_due, self._mean_momenta = None, False, None
        self.outgoing.restore(state["order"], state["step"])

    def fail(self) -> None:
        """Roll back a step that failed on this rank."""
        self._rule = ""  # others may still be in this step: launch nothing more before a vote
        self.turns.unlearn()
        self.rollback()
        self.wrapped.rollback()
        self.tracker.failed()
        self.outgoing.clear()
        self.outgoing.layout.release_gradients()
        self.wrapped.failed()

    def _trained(self) -> list[Tensor]:
        """Return the exchanged parameters, including one frozen after backward: the step will use its gradient."""
        own = self.tracker.has_added_to
        return [p for p in self.names if p.numel() and (p.requires_grad or (own(p) and p.grad is not None))]

    # -- prepare -----------------------------------------------------------------------------------------------------

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.compressor.in_turn

    @property
    def exchanges(self) -> Sequence[PendingExchange[Any]]:
        return self.outgoing.exchanges

    def ballot(self, final: bool) -> Ballot:
        self.wrapped.follow_groups()
        trained, tracker, outgoing = self._trained(), self.tracker, self.outgoing
        layout, here = outgoing.layout, self.participation.here
        grads = [param.grad for param in trained]
        if not self.settings.sparse_as_dense:
            self._sparse |= {p for p, grad in zip(trained, grads, strict=True) if grad is not None and grad.is_sparse}
        changed = tracker.changed()
        if final and any(bucket.index < outgoing.launched for bucket in changed):
            if not outgoing.stale:  # not for a further backward pass, which is expected from now on
                self.early.was_mistaken(outgoing.step)
            outgoing.mark_stale()
        used = [grad is not None for grad in grads]
        prepared = layout.fits(trained, self._sparse) and not self._is_due
        names = layout.names if prepared else [self.names[param] for param in trained]
        if not prepared:
            unfrozen = {p: self.names[p] for p in trained if p.requires_grad}
            check_trainable(unfrozen, may_be_sharded=True)
            if any(isinstance(param, LocalShard) for param in self.names):  # not DiLoCo's outer parameters
                check_shards(unfrozen, self.comm)
            layout.check_sizes()
        elif final and not outgoing.stale and self.compressor.sends == "gradient":
            tracker.release(changed)
            outgoing.fill_rest()
            changed = []
        self.comm.finish_on_device()
        infinite = tracker.find_infinite(trained, grads, changed) if here else None
        if infinite is not None:
            log.log(
                logging.WARNING if self.early.possible else logging.INFO,  # loss scaling expects it
                "dgcopt: rank %s, step %d: the gradient of parameter %r holds NaN or Inf; no rank takes this step",
                *(self.comm.rank, outgoing.step, self.names[infinite]),
            )
        expected = self.turns.expected if self.turns.are_shared else self
        return Ballot(
            active=here,
            finite=infinite is None,
            step=outgoing.step,
            trained=self._checksum_of(names),
            launched=(self.turns.sent or 0) if expected is None else expected.outgoing.launched,
            stale=outgoing.stale,
            prepared=prepared,
            complete=all(used),
            final=final,
            here=here,
            settings=self._groups.checksum(),
            own=tracker.touch,
            averaged=self._touched,
            used=fingerprint(used),
        )

    def _checksum_of(self, names: Sequence[str]) -> int:
        """Return 32 bits that are equal on ranks with the same settings, steps and trained parameters."""
        compared = (repr(self.compressor), self.wrapped.not_taken, names)
        if compared != self._compared:
            self._compared = compared
            self._checksum = checksum([plain(self.compressor), self._not_taken, *names])
        return self._checksum

    def begin(self, verdict: Verdict) -> Generator[Handle, Tensor, Verdict]:
        """Begin this step for all optimizers of the wire: cancel early launches of another one that was expected."""
        self.void = False
        if self.turns.are_shared:
            expected, sent = self.turns.expected, self.turns.sent
            self.turns.came(self)
            if expected is not self and verdict.launched:
                is_lost = expected is None and sent is not None and sent < verdict.launched
                lines = [f"optimizer that stepped here the last time: {'freed' if is_lost else 'alive'}"]
                yield from self.scheduler.through(compare(lines, self.comm.rank, "optimizers", FREED))
                if expected is not None:
                    yield from expected.cancel(verdict.launched)
                return replace(verdict, launched=0)
        return verdict

    def describe(self) -> Description:
        exchanged = self.outgoing.layout.trained or self.names
        remedy = CHANGED if all(param.requires_grad for param in exchanged) else FROZEN
        return Description(self._description(), "parameters", remedy)

    def repeats(self, verdict: Verdict, same_ranks: bool) -> bool:
        is_same = verdict.prepared and verdict.same_settings and same_ranks
        return verdict.stale or not is_same or bool(verdict.averaged_changed)

    def catch_up(self, launched: int) -> None:
        self.outgoing.launch_until(launched)

    def cancelled(self) -> None:
        self.tracker.release()
        self.outgoing.clear()

    def adapt(self, verdict: Verdict) -> Job:
        through, settings = self.scheduler.through, self.settings
        first = min({*range(self.comm.size)} - {*verdict.absent})
        if verdict.absent:  # learning rate schedules stand still on ranks without data
            yield from through(self._groups.take_over(first, self.comm, not self.participation.here))
        if self._is_due:
            yield from self._make_change()
        if not verdict.prepared:
            yield from self._lay_out()
        if not verdict.same_settings:
            yield from through(self._groups.agree(first, self.comm, settings.on_divergence))
        self._touched = Touch.UNKNOWN
        if verdict.averaged_changed or verdict.own_changed:
            self._changes.check(verdict, self.outgoing.step)
        yield from self.outgoing.measure_norm()

    # -- commit or abort ---------------------------------------------------------------------------------------------

    def used(self) -> list[bool]:
        return [self.participation.here and param.grad is not None for param in self.outgoing.layout.trained]

    def launch(self, used: Sequence[bool] | None, together: bool) -> None:
        if used is not None and not any(used) and self.participation.here and not self._warned:
            self._warned = True
            if not self.comm.joins_replicas and is_sharded_elsewhere(self.names):
                raise ConfigError(
                    f"rank {self.comm.rank}: fully_shard has replaced the parameters of the model after the optimizer "
                    f"was wrapped, so no parameter of this {type(self.wrapped.optimizer).__name__} gets a gradient. "
                    f"Call fully_shard first, make the optimizer of model.parameters() then, and wrap it last"
                )
            log.warning(
                "dgcopt: rank %s, step %d: no parameter of this %s has a gradient, on any rank, so it changes "
                "nothing. If backward() was called, zero_grad() came between it and step(), or the model's "
                "parameters are not the optimizer's any more: make the optimizer after layers are replaced, or "
                "loaded with assign=True",
                *(self.comm.rank, self.outgoing.step, type(self.wrapped.optimizer).__name__),
            )
        self.outgoing.launch_rest(used, together)

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        return self.outgoing.finished(used)

    def flush(self, used: list[bool] | None) -> Job | None:
        flushes = self._flushes or (self._change is not None and not self._change.keeps_residual)
        return self.outgoing.flush(used) if flushes else None

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        self.scheduler.count_step(sum(each.numel for each in finished))
        self.outgoing.count_step()
        self._is_due = self._change is not None  # this step has flushed the residuals
        self.wrapped.committed()

    def rollback(self) -> None:
        self.outgoing.rollback()

    def aborted(self, why: Aborted) -> None:
        self.void, self.infinite = True, why.ranks
        if why.ranks or why.arrived:
            self.scheduler.telemetry.count_skipped()
        if why.ranks and self.comm.rank not in why.ranks:  # that rank has logged it with its ballot
            log.info(
                "dgcopt: step %d is skipped: NaN or Inf in the gradients of rank(s) %s", self.outgoing.step, why.ranks
            )
        if why.arrived:
            log.warning(
                "dgcopt: rank %s, step %d is skipped, on all ranks: NaN or Inf arrived in %s",
                *(self.comm.rank, self.outgoing.step, ", ".join(map(str, why.arrived))),
            )
        self.outgoing.layout.release_gradients()
        self.wrapped.aborted()

    def ended(self) -> None:
        self.wrapped.release_state()
        self.tracker.clear()
        self.outgoing.clear()

    # -- layout of buckets -------------------------------------------------------------------------------------------

    def _lay_out(self) -> Job:
        """Compare parameters, and lay out buckets by the order in which gradients became ready.

        The store keeps memory of parameters in the old buckets for the new ones.
        """
        through, settings, layout = self.scheduler.through, self.settings, self.outgoing.layout
        trained = self._trained()
        named = [(self.names[param], param) for param in trained]
        wanted = () if layout.buckets or layout.sparse else layout.order  # restored from a state
        if {*wanted} != {name for name, _ in named}:  # other parameters are trained now: use the gradient-ready order
            wanted = ()
        self.replace_layout(wanted)
        sizes = bucket_sizes(settings, self.compressor, named)
        lines = [*self._description(), "buckets: {:g} MB, the first {:g}".format(*sizes)]
        if self._begun:
            yield from through(compare(lines, self.comm.rank, "parameters"))
        else:
            yield from self._compare_start(lines)
            self._begun = True
        wanted = wanted or [self.names[param] for param in self.tracker.additions]
        laid_out = lay_out(named, wanted, self._sparse, self.compressor, settings, self.comm, self.store)
        self.outgoing.adopt((yield from through(laid_out)))
        self._sparse |= {param for _, param in self.outgoing.layout.sparse}

    def _compare_start(self, lines: list[str]) -> Job:
        """Compare `lines`, the optimizer's state and weights before the first step over this wire."""
        through, rank, on_divergence = self.scheduler.through, self.comm.rank, self.settings.on_divergence
        start = self._groups.describe() + self.wrapped.describe_start(warn=rank == 0)
        title = "initial state"
        if on_divergence == "warn":
            yield from through(compare(lines, rank, "parameters"))
            try:
                yield from through(compare(start, rank, title, REMEDY))
            except MismatchError as error:
                log.warning('dgcopt: %s Training goes on, as on_divergence="warn" asks', error)
        else:
            yield from through(compare(lines + start, rank, title, REMEDY))
        weights = {name: [param] for param, name in self.names.items()}
        yield from through(replicas(weights, self.comm, 0, on_divergence))

    def _description(self) -> list[str]:
        """Return the lines that must be equal on all ranks when buckets are laid out."""
        return [self._not_taken, *self.wrapped.describe(self.settings, set(self._trained()))]

    @property
    def _not_taken(self) -> str:
        """Return the number of exchanged steps that the optimizer has not taken, as a line to compare."""
        number = self.wrapped.not_taken
        return f"steps that were exchanged and not taken: {number}" + (
            " (optimizer.step() failed, or was left out: restore all ranks from a checkpoint)" if number else ""
        )


def _sum_of(tensor: Tensor, group: Group, label: str) -> Generator[Collective, Tensor, Tensor]:
    """Return the sum over ranks."""
    return (yield AllReduce(tensor, op="sum", group=group, label=label))
