"""A step of the gradients in DDP's buckets: one client of `dgcopt.exchange.step`."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...compressors.sparse.rows import gather_rows
from ...errors import PayloadError
from ...exchange.commit import CommitMarker, FinishedExchange, Write, rollback_memory
from ...exchange.runner import Job, describe_in_flight
from ...exchange.scheduler import CollectiveScheduler, PendingExchange, exchange_of
from ...exchange.step import Aborted, Description, Step
from ...exchange.vote import Ballot, Verdict, checksum, fingerprint, plain
from ...flat.gradient import SparseSum, values_of
from ...kernels import peaks
from ..introspection import ddp_module_without_data
from .bucket import Part, PartGradients, gradients_of
from .memory import HookMemory
from .settings import HookSettings

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookStep"]

log = logging.getLogger("dgcopt")

Exchanges = list[PendingExchange[PartGradients]]


class HookStep(Step):
    """The steps of one `ddp_hook` on one rank: buckets arrive during backward, and are exchanged and written back.

    Args:
        settings: the hook's settings.
        memory: memory by part of a bucket.
        scheduler: starts collectives.
        marker: tells whether the last step was interrupted.
    """

    def __init__(
        self, settings: HookSettings, memory: HookMemory, scheduler: CollectiveScheduler, marker: CommitMarker
    ) -> None:
        super().__init__(scheduler, marker)
        self._settings = settings
        self._memory = memory
        self._rule = ""  # the compressor's settings in the last step
        self._has_changed = False  # since the last commit
        self._scale = 1.0  # of the loss
        self._share = 1.0  # weight of a rank with data in a mean over all ranks
        self._served: DistributedDataParallel | None = None
        self._used: list[bool] = []
        self._zeros: list[bool] = []  # True for gradients of zeros; DDP's buckets hold zeros in place of None, too
        self._warned = False
        self.ended()

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self._settings.compressor.in_turn

    @property
    def exchanges(self) -> Exchanges:
        return self._exchanges

    @property
    def is_under_way(self) -> bool:
        """True if buckets have arrived whose step is not committed or aborted."""
        return bool(self._arrived)

    # -- during backward ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepare for the first bucket of a backward pass, also after a failed one."""
        if self._arrived:
            self.fail()
        before, self._rule = self._rule, repr(self._settings.compressor)
        self._has_changed = bool(before) and before != self._rule
        scaler = self._settings.scaler
        self._scale = float(scaler.get_scale()) if scaler is not None else 1.0

    def add(self, bucket: GradBucket, future: Future[Tensor]) -> None:
        """Take in a bucket whose gradients are complete, and launch its exchanges as far as they may be.

        If settings have changed on some ranks only, the vote must find out before messages differ.
        """
        buffer, compressor = bucket.buffer(), self._settings.compressor
        exchanges = self._exchanges_of(bucket)
        self._arrived.append((buffer, exchanges, future))
        waits = compressor.whole_model or self._has_changed or not self._memory.step
        for pending in exchanges:
            self._exchanges.append(pending)
            if compressor.overlaps(buffer.device) and not waits:
                self._launch(pending)

    def _exchanges_of(self, bucket: GradBucket) -> Exchanges:
        params, buffer = bucket.parameters(), bucket.buffer()
        names, parts = self._memory.parts_of(bucket, self.scheduler, len(self._exchanges))
        if buffer.is_sparse:
            magnitudes = peaks([values_of(buffer)])
            of = PartGradients(None, params, buffer, [buffer], magnitudes)
            return [PendingExchange(f"sparse gradient {names[0]}", of)]
        grads, exchanges = gradients_of(params, buffer), []
        for part in parts:
            mine = [grads[place] for place in part.places]
            magnitudes = part.fill(mine, self._factor_of(part))
            of = PartGradients(part, [params[place] for place in part.places], buffer, mine, magnitudes)
            exchanges.append(PendingExchange(part.bucket.label, of))
        return exchanges

    def fail(self) -> str:
        """Roll back a step that is not committed; return the words to append to an error of the wire."""
        told = describe_in_flight(self._exchanges)
        self.rollback()
        self.ended()
        return told

    # -- prepare -----------------------------------------------------------------------------------------------------

    def ballot(self, final: bool) -> Ballot:
        settings, memory = self._settings, self._memory
        if settings.names is None and memory.step == 0:
            settings.compressor.see_parameters(memory.names)
        memory.check_adopted()
        self.comm.finish_on_device()
        magnitudes = [number for pending in self._exchanges for number in pending.of.magnitudes.tolist()]
        self._served = served = ddp_module_without_data(memory.names)
        has_grad = [served is None and param.grad is not None for each in self._exchanges for param in each.of.params]
        self._zeros = [magnitude == 0 and has for magnitude, has in zip(magnitudes, has_grad, strict=True)]
        self._used = [magnitude != 0 or is_zero for magnitude, is_zero in zip(magnitudes, self._zeros, strict=True)]
        return Ballot(
            active=served is None,
            finite=all(map(math.isfinite, magnitudes)),
            step=memory.step,
            trained=checksum(self.describe().lines),
            launched=sum(pending.exchange is not None for pending in self._exchanges),
            complete=all(self._used),
            by_active=served is not None and not served._divide_by_initial_world_size,
            settings=settings.groups.checksum() if settings.groups is not None else 0,
            used=fingerprint(self._used),
        )

    def describe(self) -> Description:
        lines = [
            f"compression: {plain(self._settings.compressor)}",
            *(name for names in self._memory.layout for name in names),
        ]
        return Description(lines, "settings and buckets of DDP")

    def repeats(self, verdict: Verdict, same_ranks: bool) -> bool:
        before, self._share = self._share, self.comm.size / verdict.active_ranks if verdict.by_active else 1.0
        same_settings = verdict.same_settings or self._settings.groups is None
        return before != self._share or not same_settings

    def cancelled(self) -> None:
        for pending in self._exchanges:
            if pending.of.part is not None:
                pending.of.part.fill(pending.of.grads, self._factor_of(pending.of.part))

    def adapt(self, verdict: Verdict) -> Job:
        if not verdict.same_settings and self._settings.groups is not None:
            yield from self.scheduler.through(self._settings.groups.agree(0, self.comm, "raise"))

    def used(self) -> list[bool]:
        return self._used

    # -- launching ---------------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        """Factor of DDP's gradients before an exchange that divides by all ranks."""
        return self._share / self._scale

    def _factor_of(self, part: Part) -> float:
        """Factor of DDP's gradients in the exchange of a part, which may leave no division to be done after it."""
        return self._factor * self._memory.contexts[part].place.prescale

    def launch(self, used: Sequence[bool] | None, together: bool) -> None:
        waiting = [pending for pending in self._exchanges if pending.exchange is None]
        compressor, contexts = self._settings.compressor, self._memory.contexts
        if compressor.whole_model and waiting:
            parts = [pending.of.part for pending in waiting if pending.of.part is not None]
            for part in parts:
                contexts[part].begin(self._memory.step, share=self._share)
            compressor.prepare([part.bucket.grad for part in parts], [contexts[part] for part in parts])
        for pending in waiting:
            self._launch(pending, used is None, together)

    def _launch(self, pending: PendingExchange[PartGradients], certain: bool = False, together: bool = False) -> None:
        part = pending.of.part
        if part is None:
            self.scheduler.launch(pending, gather_rows(pending.of.buffer * self._factor, self.comm.size))
            return
        context = self._memory.contexts[part]
        local = part.local(pending.of.grads, self._factor_of(part)) if part.bucket.in_place else None
        context.begin(self._memory.step, certain, local, self._exchanges.index(pending), self._share)
        self.scheduler.launch(pending, exchange_of(part.bucket, self._settings.compressor, context, together))

    # -- commit or abort ---------------------------------------------------------------------------------------------

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        left, zeros = itertools.repeat(True) if used is None else iter(used), iter(self._zeros)
        return [
            self._finished(pending, *([next(flags) for _ in pending.of.grads] for flags in (left, zeros)))
            for pending in self._exchanges
        ]

    def _finished(
        self, pending: PendingExchange[PartGradients], used: list[bool], zeros: list[bool]
    ) -> FinishedExchange:
        of, numel = pending.of, sum(grad.numel() for grad in pending.of.grads)
        if of.part is None:

            def prepare_rows(result: Tensor | SparseSum) -> Write:
                assert isinstance(result, Tensor)
                scaled = result * self._scale
                return lambda: setattr(pending, "result", scaled)

            return FinishedExchange(pending, None, None, prepare_rows, numel)
        context = self._memory.contexts[of.part]
        prepare = functools.partial(of.prepare, local=context.local, used=used, zeros=zeros, scale=self._scale)
        return FinishedExchange(pending, context, None if all(used) else used, prepare, numel)

    def rollback(self) -> None:
        rollback_memory(((part.bucket, context) for part, context in self._memory.contexts.items()), self.marker)

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        self.scheduler.count_step(sum(each.numel for each in finished))
        self._memory.count_step()
        if self._served is None:
            self._expect_step()
        for buffer, exchanges, future in self._arrived:
            future.set_result(exchanges[0].result if buffer.is_sparse else buffer)  # type: ignore[arg-type]

    def aborted(self, why: Aborted) -> None:
        """Give DDP NaN on every rank. Raises PayloadError for NaN that has arrived, if no scaler skips the step."""
        rank, step, scaler = self.comm.rank, self._memory.step, self._settings.scaler
        if why.arrived:
            named = ", ".join(map(str, why.arrived))
            if scaler is None:
                raise PayloadError(
                    f"rank {rank}, step {step}: NaN or Inf arrived in {named}; no rank takes this step. "
                    f"Look for damaged messages by dgcopt.init(checksums=True)."
                )
            log.warning("dgcopt: rank %d, step %d: NaN or Inf arrived in %s", rank, step, named)
        if why.ranks:
            log.log(
                logging.WARNING if scaler is None else logging.INFO,  # loss scaling causes it on purpose
                "dgcopt: step %d: NaN or Inf in the gradients of rank(s) %s; nothing is averaged",
                *(step, why.ranks),
            )
        self.scheduler.telemetry.count_skipped()
        for buffer, _, future in self._arrived:
            values_of(buffer).fill_(torch.nan)
            future.set_result(buffer)

    def _expect_step(self) -> None:
        """Warn if gradients were exchanged before, and the optimizer has not stepped since."""
        attached = self._settings.attached
        if attached is None:
            return
        if attached.is_due and self._memory.keeps_any and not self._warned:
            self._warned = True
            log.warning(
                "dgcopt: rank %d, step %d: ddp_hook has exchanged gradients twice, and %s has not stepped in between. "
                "%s's residual now contains both gradients, even if the first was zeroed since, so training goes "
                "wrong. Run backward passes without a step (accumulation; a GAN's discriminator while the generator "
                "is trained) inside ddp_model.no_sync(), where nothing is sent",
                *(self.comm.rank, self._memory.step - 1, type(attached.optimizer).__name__),
                type(self._settings.compressor).__name__,
            )
        attached.expect_step()

    def ended(self) -> None:
        self._exchanges: Exchanges = []
        self._arrived: list[tuple[Tensor, Exchanges, Future[Tensor]]] = []
