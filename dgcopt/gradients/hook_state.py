"""What DDP's hook keeps and does on one rank: its buckets come in, are exchanged, and are written back."""

from __future__ import annotations

import copy
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoint import check_owner
from ..comm import Comm, current_comm
from ..compressors import Compressor, Context, NoCompression, accept
from ..compressors.own_step import updates_add_up
from ..compressors.sparse_rows import gather_rows
from ..errors import ConfigError, PayloadError
from ..exchange.agreement import compare
from ..exchange.commit import (
    Arrived,
    Commit,
    commit_gradients,
    commit_memory,
    inspect,
    prepare_gradients,
    prepare_memory,
)
from ..exchange.group_settings import GroupSettings, check_may_differ
from ..exchange.link import measure_link
from ..exchange.parameters import (
    check_trainable,
    describe,
    inner_optimizer,
    plain,
    unique_names,
)
from ..exchange.runner import Job, Runner, on_their_way
from ..exchange.scheduler import CollectiveScheduler, PendingExchange, claim, context_of, exchange_of
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, checksum, fingerprint, used_anywhere, vote
from ..flat.gradient import SparseSum, values_of
from ..flat.store import Store
from ..kernels import peaks
from .attached import AttachedOptimizer, parameters_of
from .ddp_bucket import Part, PartGradients, gradients_of, parts_of
from .ddp_module import module_with, uncounted_parameters
from .stepping import stepping_of

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookState"]

log = logging.getLogger("dgcopt")


class HookState:
    """What the hook keeps on one rank: the compressor, what was held back, and the exchanges of the step.

    Pickled (`torch.save`) and restored, it continues with the same bits on the same rank of as many: give it to
    `ddp_hook` with the optimizer, and register what that returns. Until DDP has rebuilt its buckets, sums that depend
    on their layout (an allreduce among more than two ranks) may differ in their last bits.

    Attributes: `compressor`; `step`, steps finished so far; `telemetry`, bytes and seconds of this process.
    """

    def __init__(self, compressor: Compressor | Any = None) -> None:
        self.compressor: Compressor = NoCompression() if compressor is None else copy.deepcopy(accept(compressor))
        self._start()
        if self.compressor.source == "auto":
            self.compressor.source = "gradient"
            self._would_send_updates = True
        if self.compressor.sends == "update":
            raise ConfigError(
                f"{type(self.compressor).__name__} sends the updates that the optimizer makes, and DDP exchanges "
                f"gradients: use dgcopt.DistributedOptimizer, without DDP"
            )
        self.step = 0

    def _start(self) -> None:
        self._would_send_updates = False
        self.telemetry = Telemetry()
        self._lock = threading.RLock()
        self._store = Store()
        self._commit = Commit()
        self._saved: dict[str, Any] | None = None  # what was restored, until it is known to belong here
        self._given: dict[Tensor, str] | None = None
        self._names: dict[Tensor, str] = {}
        self._attached: AttachedOptimizer | None = None
        self._may_differ: Sequence[str] = ()
        self._groups: GroupSettings | None = None  # of the attached optimizer
        self._scaler: Any = None
        self._scale = 1.0
        self._share = 1.0
        self._warned = False
        self._comm: Comm | None = None
        self._rule = ""  # the compressor's settings, as they were in the last step
        self._has_changed = False  # since then: if on some ranks only, the vote is to tell before messages differ
        self._layout: dict[tuple[str, ...], list[Part]] = {}
        self._contexts: dict[Part, Context] = {}
        self._exchanges: list[PendingExchange[PartGradients]] = []
        self._arrived: list[tuple[Tensor, list[PendingExchange[PartGradients]], Future[Tensor]]] = []
        self._uncounted: set[Tensor] = set()
        """What is yet to come of a backward pass in which DDP does not say which bucket is the last."""

    @property
    def comm(self) -> Comm:
        """The wire: given, or that of `dgcopt.init()`, joined when it is first needed."""
        return self._runner.comm

    @functools.cached_property
    def _runner(self) -> Runner:
        self._comm = self._comm or current_comm()
        module = module_with(self)
        if module is not None and module.process_group.size() != self._comm.size:
            raise ConfigError(
                f"this DistributedDataParallel averages among {module.process_group.size()} rank(s), and its ddp_hook "
                f"among {self._comm.size}: give ddp_hook the same ranks, comm=dgcopt.init().among([...])"
            )
        runner = Runner(self._comm, "ddp_hook", lambda: None, self._forget)
        runner.scheduler.telemetry = self.telemetry
        return runner

    @property
    def _scheduler(self) -> CollectiveScheduler:
        return self._runner.scheduler

    # -- what persists -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of what this rank keeps, in plain tensors and numbers."""
        if self._comm is not None:
            self._commit.check(self._comm.rank)
        known = {name: list(param.shape) for param, name in self._names.items()}
        saved = self._saved or {}
        return {
            "rank": self._comm.rank if self._comm is not None else saved.get("rank"),
            "world_size": self._comm.size if self._comm is not None else saved.get("world_size"),
            "step": self.step,
            "shapes": known or saved.get("shapes", {}),
            "attached": self._attached is not None or saved.get("attached", False),
            **self._store.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, between steps. The next backward pass checks that it belongs here."""
        self._store.restore(state)
        self._layout, self._contexts = {}, {}
        self._commit.end()
        self._saved = {key: state[key] for key in ("rank", "world_size", "shapes", "attached")}
        self.step = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self.compressor, **self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.compressor = state["compressor"]
        self._start()
        self.load_state_dict(state)

    def attach(self, optimizer: Optimizer) -> None:
        """Let the compressor take over from the optimizer what it can, before the first backward pass.

        Another one of the same parameters takes the place of the one before. Of what Accelerate, Lightning or Fabric
        put around an optimizer, the one inside is taken, which they step.
        """
        optimizer = inner_optimizer(optimizer)
        if stepping_of(optimizer) is not None:
            raise ConfigError("the optimizer exchanges gradients by itself: give ddp_hook the one that is not wrapped")
        others = self._attached is not None and self._attached.params != parameters_of(optimizer)
        if others or self._layout:
            raise ConfigError("attach one optimizer, before the first backward pass")
        numbered = unique_names(optimizer, None)
        names = {param: (self._given or {}).get(param, name) for param, name in numbered.items()}
        check_trainable(names)
        self._groups = GroupSettings(optimizer, check_may_differ(self._may_differ, optimizer))
        if self._attached is not None:
            self._attached.detach()
        if self._given is None:
            self._given = numbered
            self.compressor.see_parameters(numbered)
        self.compressor.attach(optimizer)
        if self._would_send_updates and updates_add_up(optimizer):
            log.info(
                "dgcopt: gradients travel, and %s's moments see only what has arrived of them; in place of DDP, "
                "dgcopt.DistributedOptimizer sends the updates that it makes of whole ones",
                type(optimizer).__name__,
            )
        self._attached = AttachedOptimizer(
            optimizer,
            self.compressor,
            lambda: self.comm.size == 1,
            lambda: set(self._names if self._layout else ()),
            names,
        )

    def use(
        self, names: dict[Tensor, str] | None, comm: Comm | None, scaler: Any, may_differ: Sequence[str] = ()
    ) -> None:
        """Set the parameters' names, the wire, the loop's GradScaler and the settings that may differ, where given."""
        if names:
            self._given = names
            self.compressor.see_parameters(names)
        self._comm = comm or self._comm
        self._scaler = scaler if scaler is not None else self._scaler
        self._may_differ = may_differ or self._may_differ

    # -- during backward ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Take one of DDP's buckets; the call for the last one finishes the step. Its averaged gradients come later."""
        with self._lock:  # autograd runs a thread for each device
            return self._exchange(bucket)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self._saved is not None and self._saved.get("rank") is not None:
            check_owner(
                self._saved,
                *(self.comm.rank, self.comm.size),
                what=" of ddp_hook",
                why="each rank keeps what it has not sent yet. Let every rank save and load a file of its own, or "
                "begin with a new ddp_hook, which loses what was held back.",
            )
        if self.comm.size == 1:
            future.set_result(buffer)
            return future
        params, is_last = bucket.parameters(), bucket.is_last()
        try:
            if bucket.index() == 0 and not (self._uncounted and self._uncounted.issuperset(params)):
                self._forget()  # a backward pass that failed half-way
                before, self._rule = self._rule, repr(self.compressor)
                self._has_changed = bool(before) and before != self._rule
                self._scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
                self._uncounted = set() if is_last or self._layout else uncounted_parameters(self)
            if self._uncounted:
                self._uncounted.difference_update(params)
                is_last = not self._uncounted
            exchanges = self._exchanges_of(bucket)
            self._arrived.append((buffer, exchanges, future))
            for pending in exchanges:
                self._exchanges.append(pending)
                waits = self.compressor.whole_model or self._has_changed or not self.step
                if self.compressor.overlaps(buffer.device) and not waits:
                    self._launch(pending)
        except BaseException:
            self._forget()
            raise
        if is_last:
            self._runner.finish(self._finish)
        return future

    def _exchanges_of(self, bucket: GradBucket) -> list[PendingExchange[PartGradients]]:
        """The exchanges of one DDP bucket, whose gradients are ready."""
        params, buffer = bucket.parameters(), bucket.buffer()
        for param in params:
            if param not in self._names:
                self._names[param] = self._name(param)
        names = tuple(self._names[param] for param in params)
        if names not in self._layout:
            self._layout[names] = self._lay_out(bucket, names)
        if buffer.is_sparse:
            tells = peaks([values_of(buffer)])
            return [PendingExchange(f"sparse gradient {names[0]}", PartGradients(None, buffer, [buffer], tells))]
        grads, exchanges = gradients_of(params, buffer), []
        for part in self._layout[names]:
            mine = [grads[place] for place in part.places]
            exchanges.append(
                PendingExchange(part.bucket.label, PartGradients(part, buffer, mine, part.fill(mine, self._factor)))
            )
        return exchanges

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _name(self, param: Tensor) -> str:
        if self._given is not None:
            if param not in self._given:
                raise ConfigError(
                    f"DDP trains a parameter of shape {tuple(param.shape)} that is not among those given to ddp_hook: "
                    f"give it named_parameters and the optimizer of the whole model"
                )
            return self._given[param]
        known = list(self._saved["shapes"]) if self._saved is not None else []
        place = len(self._names)
        return known[place] if place < len(known) else f"parameter{place}"

    def _lay_out(self, bucket: GradBucket, names: tuple[str, ...]) -> list[Part]:
        """Lay out one DDP bucket, after comparing it over ranks; what is kept of its parameters moves here."""
        by_name = dict(zip(bucket.parameters(), names, strict=True))
        self._check(by_name)
        comm, optimizer = self.comm, self._attached.optimizer if self._attached is not None else None
        lines = describe(
            optimizer,  # type: ignore[arg-type]  # of which only the class is told
            by_name,
            {"compression": self.compressor, "scaler": self._scaler is not None},
        )
        lines += self._groups.describe() if self._groups is not None else []
        self._scheduler.drive(self._scheduler.through(compare(lines, comm.rank, "settings of ddp_hook")))
        self._scheduler.drive(self._scheduler.through(measure_link(comm, self.compressor, bucket.buffer().device)))
        for others in [key for key in self._layout if not set(key).isdisjoint(names)]:  # as DDP had them before
            for part in self._layout.pop(others):
                self._store.release([part.bucket])
                del self._contexts[part]
        if bucket.buffer().is_sparse:
            self._store.forget(names)
            return []

        def stays(kind: Any) -> bool:
            return not self.compressor.whole_model and self.compressor.in_place(kind)

        first = len(self._exchanges)
        grads = gradients_of(bucket.parameters(), bucket.buffer())
        parts = parts_of(by_name, grads, self.compressor.kind, stays, first)
        claim(self._store, [part.bucket for part in parts], self.compressor, comm.rank)
        for part in parts:
            self._contexts[part] = context_of(part.bucket, comm, "average", self._store)
        self._store.forget(names)
        return parts

    def _check(self, names: dict[Tensor, str]) -> None:
        """Raises ConfigError for parameters that cannot be averaged, or that a restored state does not fit."""
        check_trainable(names)
        for param, name in names.items():
            if self._attached is not None and param not in self._attached.params:
                raise ConfigError(
                    f"DDP trains parameter {name!r}, which is not in the optimizer given to ddp_hook: give it the "
                    f"optimizer of the whole model, or none"
                )
        saved = self._saved
        if saved is None:
            return
        if saved["attached"] and self._attached is None:
            raise ConfigError(
                "this state of ddp_hook had an optimizer: give it the new one, ddp_hook(state, optimizer=optimizer)"
            )
        for param, name in names.items():
            shape = saved["shapes"].get(name)
            if saved["shapes"] and shape != list(param.shape):
                raise ConfigError(
                    f"the restored state of ddp_hook knows parameter {name!r} with shape {shape}, DDP has "
                    f"{list(param.shape)}: build the same model, or name its parameters (named_parameters)"
                )

    # -- launching ---------------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        """What DDP's gradients are multiplied by before they are exchanged, where the exchange divides by all."""
        return self._share / self._scale

    def _launch(self, pending: PendingExchange[PartGradients], certain: bool = False, together: bool = False) -> None:
        part = pending.of.part
        if part is None:
            self._scheduler.launch(pending, gather_rows(pending.of.buffer * self._factor, self.comm.size))
            return
        context = self._contexts[part]
        context.step, context.certain, context.index = self.step, certain, self._exchanges.index(pending)
        if part.bucket.in_place:
            context.local = part.local(pending.of.grads, self._factor)
        self._scheduler.launch(pending, exchange_of(part.bucket, self.compressor, context, together))

    def _launch_rest(self, certain: bool) -> None:
        waiting = [pending for pending in self._exchanges if pending.exchange is None]
        if self.compressor.whole_model and waiting:
            parts = [pending.of.part for pending in waiting if pending.of.part is not None]
            self.compressor.prepare([part.bucket.grad for part in parts], [self._contexts[part] for part in parts])
        together = len(waiting) == len(self._exchanges)
        for pending in waiting:
            self._launch(pending, certain, together)

    # -- at the end of the step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _finish(self) -> Job:
        """Every bucket is here: finish all exchanges, and let DDP have their results."""
        if self._given is None and self.step == 0:
            self.compressor.see_parameters(self._names)
        for kind, name in self._store.waiting():
            raise ConfigError(
                f"the restored state of ddp_hook holds {kind} of parameter {name!r}, which DDP does not train: "
                f"build the same model, or name its parameters (named_parameters)"
            )
        self._commit.check(self.comm.rank)
        self._saved = None
        self.comm.finish_on_device()
        tells = [number for pending in self._exchanges for number in pending.of.tells.tolist()]
        used = [peak != 0 for peak in tells]
        order = [f"compression: {plain(self.compressor)}", *(name for names in self._layout for name in names)]
        served = _served_without_data()
        ballot = Ballot(
            active=served is None,
            finite=all(map(math.isfinite, tells)),
            step=self.step,
            trained=checksum(order),
            launched=len(self._exchanges),
            complete=all(used),
            by_active=served is not None and not served._divide_by_initial_world_size,
            settings=self._groups.checksum() if self._groups is not None else 0,
            used=fingerprint(used),
        )
        scheduler = self._scheduler
        verdict = yield from scheduler.through(vote(ballot, self.comm.size, "vote"))
        if not verdict.alike:
            yield from scheduler.through(compare(order, self.comm.rank, "settings and buckets of DDP"))
        if verdict.void:
            yield from scheduler.cancel(self._exchanges)
            self._abort(verdict.void)
        else:
            if not verdict.same_settings and self._groups is not None:
                yield from scheduler.cancel(self._exchanges)
                yield from scheduler.through(self._groups.agree(0, self.comm, "raise"))
            share = self.comm.size / verdict.active_ranks if verdict.by_active else 1.0
            if share != self._share:
                self._share = share
                yield from self._cancel()
            if verdict.complete:
                used = [True] * len(used)
            elif not verdict.used_alike:
                used = yield from scheduler.through(used_anywhere(used, "gradients that there are"))
            self._launch_rest(certain=verdict.complete)
            yield from scheduler.finish(self._exchanges, self.compressor.in_turn)
            is_made = self._commit_step(used)
            if served is None and is_made:
                self._expect_step()
        for buffer, exchanges, future in self._arrived:
            result = exchanges[0].result if buffer.is_sparse and not verdict.void else buffer
            future.set_result(result)  # type: ignore[arg-type]  # a tensor, as sparse gradients are gathered whole
        self._commit.end()
        self._forget()

    def _cancel(self) -> Job:
        """Undo what was launched before it was known by how many ranks averages divide; all ranks do."""
        self.telemetry.repeated += any(pending.exchange is not None for pending in self._exchanges)
        yield from self._scheduler.cancel(self._exchanges)
        for pending in self._exchanges:
            if pending.of.part is not None:
                self._contexts[pending.of.part].rollback()
                pending.of.part.fill(pending.of.grads, self._factor)

    def _abort(self, ranks: list[int]) -> None:
        """Gradients of `ranks` are not finite: memory stays what it was, and DDP is given NaN on every rank."""
        self.telemetry.skipped += 1
        if ranks:
            log.log(
                logging.WARNING if self._scaler is None else logging.INFO,  # loss scaling brings it about
                "dgcopt: step %d: NaN or Inf in the gradients of rank(s) %s; nothing is averaged",
                *(self.step, ranks),
            )
        for buffer, *_ in self._arrived:
            values_of(buffer).fill_(torch.nan)

    def _commit_step(self, used: list[bool]) -> bool:
        """Write results into DDP's memory, and keep what was held back; False if NaN or Inf has arrived.

        Raises PayloadError then, on all ranks, unless a scaler is there to skip the step.
        """
        start, left = time.perf_counter(), iter(used)
        arrived = [self._arrived_by(pending, [next(left) for _ in pending.of.grads]) for pending in self._exchanges]
        not_finite = inspect(arrived, self.comm)
        if not_finite:
            named = ", ".join(map(str, not_finite))
            if self._scaler is None:
                raise PayloadError(
                    f"rank {self.comm.rank}, step {self.step}: NaN or Inf arrived in {named}; no rank takes this step. "
                    f"Look for damaged messages by dgcopt.init(checksums=True)."
                )
            log.warning("dgcopt: rank %d, step %d: NaN or Inf arrived in %s", self.comm.rank, self.step, named)
            self._abort([])
            return False
        prepare_memory(arrived)
        writes = prepare_gradients(arrived)
        self._commit.begin("memory and gradients")
        commit_memory(arrived, self.telemetry)
        commit_gradients(writes)
        self._scheduler.count_step(sum(one.numel for one in arrived))
        self.step += 1
        self.telemetry.apply_seconds += time.perf_counter() - start
        return True

    def _arrived_by(self, pending: PendingExchange[PartGradients], flags: list[bool]) -> Arrived:
        """The gradients that an exchange has made, to be written into DDP's memory."""
        of, numel = pending.of, sum(grad.numel() for grad in pending.of.grads)
        if of.part is None:

            def prepare_rows(result: Tensor | SparseSum) -> Callable[[], None]:
                assert isinstance(result, Tensor)
                scaled = result * self._scale
                return lambda: setattr(pending, "result", scaled)

            return Arrived(pending, None, None, prepare_rows, numel)
        context = self._contexts[of.part]
        prepare = functools.partial(of.prepare, local=context.local, used=flags, scale=self._scale)
        return Arrived(pending, context, None if all(flags) else flags, prepare, numel)

    def _expect_step(self) -> None:
        """Say so if gradients were exchanged before, and the optimizer has not stepped since."""
        attached = self._attached
        if attached is None:
            return
        keeps = any(context.memory or context.shards for context in self._contexts.values())
        if attached.is_due and keeps and not self._warned:
            self._warned = True
            log.warning(
                "dgcopt: rank %d, step %d: ddp_hook has exchanged gradients twice, and %s has not stepped in between. "
                "What %s keeps has both in it, even if the first were set to zero since, so training goes wrong. Let "
                "backward passes that no step follows (accumulation; a GAN's discriminator while the generator is "
                "trained) run inside ddp_model.no_sync(), where nothing is sent",
                *(self.comm.rank, self.step - 1, type(attached.optimizer).__name__, type(self.compressor).__name__),
            )
        attached.is_due = True

    def _forget(self) -> str:
        """The step is over, or failed: what it has not settled is rolled back."""
        told = on_their_way(self._exchanges)
        for context in self._contexts.values():
            context.rollback()
        self._exchanges, self._arrived = [], []
        return told


def _served_without_data() -> DistributedDataParallel | None:
    """The model whose `join()` calls the hook for this rank, which has run out of data; None in a backward pass.

    DDP tells its hooks nothing of that.
    """
    frame = sys._getframe() if torch._C._current_graph_task_id() < 0 else None
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, DistributedDataParallel):
            return model
        frame = frame.f_back
    return None
