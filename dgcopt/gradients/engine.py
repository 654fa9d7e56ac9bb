"""The gradients of one optimizer on their way: when their exchanges start, and when results may be used.

Buckets are launched in one fixed order on all ranks, each as soon as its gradients are ready and its predecessor was
launched, and run to their first collective while backward goes on. Before any result is used, `synchronize` takes a
vote (`dgcopt.exchange.vote`). If some rank's gradients are not finite, what was sent is taken back, all memory stays
what it was, and nobody takes the step. If some rank's gradients have changed since they were sent (one more backward
pass, clipping, unscaling), it is taken back and sent anew. Otherwise all exchanges are finished, in bucket order
(`dgcopt.exchange.flights`).

The first step sends nothing early. Its gradients say in which order they become ready and which are sparse; the ranks
agree on rank 0's order, and buckets are laid out by it. The same happens when other parameters are trained.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, Handle
from ..compressors import Compressor, Context
from ..compressors.sparse_rows import gather_rows
from ..errors import CommError, ConfigError, MismatchError
from ..exchange.agreement import compare
from ..exchange.divergence import replicas
from ..exchange.flights import Flight, Traffic, context_of, exchange_of
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, Verdict, used_anywhere, vote
from ..flat.buckets import Bucket, Memory, copied
from ..flat.segments import Segment
from .arrivals import Gradients
from .layout import Layout, lay_out
from .settings import Settings

__all__ = ["Engine"]

log = logging.getLogger("dgcopt")

REMEDY = (
    " What only one rank has loaded, dgcopt.broadcast_optimizer_state(optimizer, root_rank=0) before the first step "
    "gives to all."
)

LONGEST_PAUSE = 1024
"""Steps without early launches after launches that proved too early again and again."""


@dataclass(eq=False)
class _Flight(Flight):
    """The exchange of a bucket's gradients, or of a parameter's sparse one."""

    of: Bucket | Tensor


class Engine:
    """The exchanges of one optimizer's gradients on one rank.

    Args:
        names: every parameter and its unique name, in an order that is the same on all ranks; may grow.
        compressor: how gradients travel.
        comm: the wire.
        settings: how they are exchanged.
        describe: everything that must be equal on all ranks, a line each; compared whenever buckets are laid out.
        describe_start: what must be equal beyond that before the first step, a line each; afterwards it stays so.
        replicated: what must be equal on all ranks, bit for bit, by parameter name.
        local_update: replaces each gradient by the update that the optimizer makes of it; for compressors whose
            source is the update.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        compressor: Compressor,
        comm: Comm,
        settings: Settings,
        describe: Callable[[], list[str]],
        describe_start: Callable[[], list[str]],
        replicated: Callable[[], dict[str, list[Tensor]]],
        local_update: Callable[[], None],
    ) -> None:
        self.names = names
        self.compressor = compressor
        self.comm = comm
        self.settings = settings
        self.step = 0
        self.void = False
        """Whether the step that was synchronised last must not be taken, on any rank."""
        self.infinite: list[int] = []
        """Ranks whose gradients were not finite when a step was last made void."""
        self.active = True
        """Whether this rank still has data of its own."""
        self.actives = comm.size
        """How many ranks had data at the last step."""
        self.divide_by_active = True
        """Whether averages divide by the ranks that have data, or by all."""
        self.early = True
        """Whether buckets may be launched before the step."""
        self.on_shadowed: Callable[[], None] | None = None
        """Takes the step of a rank without data when other ranks have moved it on (simulated wire)."""
        self._describe = describe
        self._describe_start = describe_start
        self._begun = False
        self._replicated = replicated
        self._local_update = local_update
        self._layout: Layout | None = None
        self._outdated = False
        self._kept: Memory = {}
        self._shared: Memory = {}
        self._kept_order: list[str] = []
        self._contexts: dict[Bucket, Context] = {}
        self._gradients = Gradients()
        self._sparse: set[Tensor] = set()
        self._stale = False
        self._mistakes = 0
        self._pause_until = 0
        self._launched = 0
        self._flights: list[_Flight] = []
        self._driver: Generator[Handle, Tensor, None] | None = None
        self._awaited: Handle | None = None
        self._finished_by_others = False
        self._failure: Exception | None = None
        self._traffic = Traffic(comm, Telemetry(), "optimizer", self._progress)

    # -- during backward ---------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far."""
        return self._traffic.telemetry

    @telemetry.setter
    def telemetry(self, before: Telemetry) -> None:
        self._traffic.telemetry = before

    @property
    def in_flight(self) -> bool:
        """Whether gradients of a step have come in that `synchronize` has not finished."""
        return bool(self._gradients.arrivals)

    @torch.no_grad()
    def arrived(self, param: Tensor) -> None:
        """Take note of a backward pass that has added to a gradient, and launch what is complete.

        Raises RuntimeError if it is one pass more than the user said there would be.
        """
        announced = self.settings.backward_passes_per_step
        if not self.in_flight:
            if self._driver is not None:
                self._progress()  # the end of a `join` that other ranks have left since
            self._finished_by_others = False
            self._outdated = self._layout is not None and not self._layout.fits(self._trained(), self._sparse)
        is_last = self._gradients.arrived(param, announced)
        passes = self._gradients.passes.get(param, 0)
        if passes > announced > 1:
            raise RuntimeError(
                f"rank {self.comm.rank}: the gradient of parameter {self.names[param]!r} was computed "
                f"{passes} times before step(), but backward_passes_per_step is {announced}. Raise it "
                f"(set_backward_passes_per_step), do all but the last pass inside no_sync(), or call step() after "
                f"every {announced} passes."
            )
        layout = self._layout
        if layout is None or self._outdated or self._stale or not self.active or param not in layout.place:
            return
        if layout.place[param][0].index < self._launched:
            self._stale = True
            return
        if not is_last or not self._may_launch():
            return
        self._gradients.take(param, *layout.place[param])
        try:
            for bucket in layout.buckets[self._launched :]:
                if not self._gradients.has_filled(bucket):
                    break
                self._launch(bucket)
        except Exception:
            self.abandon()
            raise

    def _may_launch(self) -> bool:
        """Whether buckets may be launched before the step is called for."""
        compressor = self.compressor
        possible = compressor.overlap and not compressor.whole_model and compressor.sends == "gradient"
        return possible and self.early and self.step >= self._pause_until

    def discard(self) -> None:
        """Forget this step's gradients, which the user has set to zero; what was sent is taken back at the next."""
        if self._launched:
            self._stale = True
            self._be_careful()
        self._gradients.forget_arrivals()
        self.let_go()

    def _be_careful(self) -> None:
        """After a launch that proved too early: launch none for a while, the longer the more often it happens."""
        self._mistakes += 1
        self._pause_until = self.step + 1 + min(2**self._mistakes, LONGEST_PAUSE)

    def _trained(self) -> list[Tensor]:
        return [param for param in self.names if param.requires_grad and param.numel()]

    # -- launching ---------------------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket, certain: bool = False) -> None:
        self._launched += 1
        context = self._context(bucket)
        context.certain = certain
        if bucket.in_place:
            context.local = bucket.local(self.active, self._scale)
        elif self._scale != 1:
            bucket.grad.mul_(self._scale)
        flight = _Flight(bucket.label, bucket)
        self._flights.append(flight)
        self._traffic.launch(flight, exchange_of(bucket, self.compressor, context))
        if context.peak is not None:
            self._gradients.bounded(bucket, context.peak)

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by before they are exchanged, where the exchange itself divides by all."""
        partial = self.settings.op == "average" and self.divide_by_active and self.actives
        return (self.comm.size / self.actives if partial else 1.0) / self.settings.gradient_predivide_factor

    def _context(self, bucket: Bucket) -> Context:
        context = self._contexts.get(bucket)
        if context is None:
            context = context_of(bucket, self.comm, "average" if self.settings.op == "average" else "sum", self._shared)
            self._contexts[bucket] = context
        context.step = self.step
        return context

    # -- at the end of the step --------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Finish the exchange of every gradient; afterwards each `param.grad` is the averaged one, or None.

        It is None where no rank has a gradient; one that is missing on some ranks counts as zero there. If `void` is
        true afterwards, gradients are as they were and the step must not be taken. Raises what the wire raises,
        naming rank and bucket; the step is lost then.
        """
        if self._finished_by_others:
            self._finished_by_others = False
            return
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            if self._driver is None:
                self._driver, self._awaited = self._drive(), None
            while True:
                result = None if self._awaited is None else self._traffic.wait(self._awaited)
                self._awaited = self._driver.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            self._driver = None
        except CommError as error:
            on_their_way = self._on_their_way()
            self.abandon()
            raise type(error)(f"{error}{on_their_way}") from error
        except Exception:
            self.abandon()
            raise

    def hold(self) -> None:
        """From now on launch nothing before the step, because until then gradients are scaled."""
        self.early = False
        self._stale = self._stale or self._launched > 0  # scaling them back does not count as a change

    def agree_on_overflow(self) -> bool:
        """Whether gradients hold NaN or Inf on any rank, so that loss scaling can react alike; collective."""
        return bool(self._traffic.drive(self._take_vote(final=False)).void)

    def all_have_data(self) -> None:
        """Begin anew after ranks had run out of data."""
        self.active, self.actives, self.on_shadowed = True, self.comm.size, None

    def serve(self, on_shadowed: Callable[[], None]) -> None:
        """This rank has no more data: whenever another one waits for it, take part without (simulated wire)."""
        self.active, self.on_shadowed = False, on_shadowed
        self._progress()

    def _progress(self) -> None:
        """Go on as far as possible without waiting, once this step's gradients have come in."""
        if self._failure is not None:
            raise self._failure
        if self._driver is None:
            if self._finished_by_others or (self.active and not self.in_flight):
                return
            self._driver, self._awaited = self._drive(), None
        try:
            while self._awaited is None or self._awaited.done():
                result = None if self._awaited is None else self.comm.wait(self._awaited)
                self._awaited = self._driver.send(result)  # type: ignore[arg-type]
        except StopIteration:
            self._driver = None
            if self.active:
                self._finished_by_others = True
            elif self.actives and self.on_shadowed is not None:
                self.on_shadowed()
                self._progress()
            else:
                self.all_have_data()
        except Exception as error:  # it is this rank's own, for when it steps, unless another one cannot go on for it
            self._failure = error
            self.abandon()

    def _on_their_way(self) -> str:
        """For an error: which buckets were sent and not finished, of which parameters."""
        waiting = [flight.label for flight in self._flights if flight.handle is not None]
        unsent = [bucket.label for bucket in self._layout.buckets[self._launched :]] if self._layout else []
        return "".join(
            f" {what}: {', '.join(labels[:4])}{f' and {len(labels) - 4} more' if len(labels) > 4 else ''}."
            for what, labels in (("On their way", waiting), ("Not sent yet", unsent))
            if labels
        )

    def abandon(self) -> None:
        """Forget a step that failed, so that the error is the last word about it."""
        self._driver = None
        for context in self._contexts.values():
            context.roll_back()
        self._end_step()
        self.let_go()

    @torch.no_grad()
    def _drive(self) -> Generator[Handle, Tensor, None]:
        """Everything that is left of the step; yields handles to wait for, is sent their results."""
        self.void = False
        verdict = yield from self._take_vote()
        while not verdict.final:  # only a rank without data of its own is not asked for its preliminary vote
            if verdict.void:
                self._make_void(verdict.void)
                return
            verdict = yield from self._take_vote()
        if not verdict.alike:
            yield from self._traffic.through(compare(self._describe(), self.comm.rank, "parameters"))
        self.actives, before = verdict.active, self.actives
        again = verdict.stale or not verdict.prepared or self.actives != before
        if again or verdict.void or not verdict.active:
            yield from self._take_back(verdict)
        if verdict.void or not verdict.active:
            self._make_void(verdict.void)
            return
        if not verdict.prepared:
            self._drop_layout()
            self._layout = yield from self._lay_out()
        layout = self._layout
        assert layout is not None
        used = None
        if not verdict.complete:
            used = yield from self._find_used(layout)
        if self.compressor.sends == "update" and self.active:
            self._make_update(layout)
        self._launch_rest(layout, used)
        yield from self._traffic.finish(self._flights, self.compressor.in_turn)
        self._hand_out(used)
        every = self.settings.check_replicas_every
        if every and self.step % every == 0:
            check = replicas(self._replicated(), self.comm, self.step, self.settings.on_divergence)
            yield from self._traffic.through(check)

    def _take_vote(self, final: bool = True) -> Generator[Handle, Tensor, Verdict]:
        trained, gradients, layout = self._trained(), self._gradients, self._layout
        if not self.settings.sparse_as_dense:
            self._sparse |= {param for param in trained if param.grad is not None and param.grad.is_sparse}
        changed = {param for param in gradients.taken if gradients.has_changed(param)}
        if final and layout is not None and any(layout.place[p][0].index < self._launched for p in changed):
            if not self._stale:  # not by one more backward pass, which is expected from now on
                self._be_careful()
            self._stale = True
        infinite = gradients.find_infinite(trained, changed) if self.active else None
        if infinite is not None:
            log.log(
                logging.WARNING if self.early else logging.INFO,  # loss scaling, for which there is `hold`, expects it
                "dgcopt: rank %d, step %d: the gradient of parameter %r holds NaN or Inf; no rank takes this step",
                *(self.comm.rank, self.step, self.names[infinite]),
            )
        ballot = Ballot(
            active=self.active,
            finite=infinite is None,
            stale=self._stale,
            prepared=layout is not None and layout.fits(trained, self._sparse),
            complete=all(param.grad is not None for param in trained),
            final=final,
            step=self.step,
            trained=zlib.crc32("\n".join(self.names[param] for param in trained).encode()),
            launched=self._launched,
        )
        return (yield from self._traffic.through(vote(ballot, "vote")))

    def _take_back(self, verdict: Verdict) -> Generator[Handle, Tensor, None]:
        """Let collectives that were started run out, on all ranks the same ones, and undo what they meant."""
        if verdict.launched and self._layout is None:
            raise MismatchError(
                f"rank {self.comm.rank} lost its buckets while other ranks have sent theirs: load state or change "
                f"parameters on all ranks alike, between steps"
            )
        while self._launched < verdict.launched:
            assert self._layout is not None
            bucket = self._layout.buckets[self._launched]
            if not bucket.in_place:
                bucket.keep_clear()
                bucket.grad.zero_()
            self._launch(bucket)
        yield from self._traffic.call_off(self._flights)
        if self._flights and not verdict.void:
            self.telemetry.repeated += 1
        for context in self._contexts.values():
            context.roll_back()
        self._gradients.put_back()
        self._flights, self._launched, self._stale = [], 0, False

    def _make_void(self, ranks: list[int]) -> None:
        """End a step that nobody takes."""
        self.void, self.infinite = True, ranks
        if ranks:
            self.telemetry.skipped += 1
            if self.comm.rank not in ranks:  # else it has said so when it found them
                log.info("dgcopt: step %d is skipped: NaN or Inf in the gradients of rank(s) %s", self.step, ranks)
        self._end_step()
        self.let_go()

    def _find_used(self, layout: Layout) -> Generator[Handle, Tensor, dict[Tensor, bool]]:
        """Which parameters have a gradient on any rank."""
        here = [self.active and param.grad is not None for param in layout.trained]
        there = yield from self._traffic.through(used_anywhere(here, "gradients that there are"))
        return dict(zip(layout.trained, there.tolist(), strict=True))

    def _make_update(self, layout: Layout) -> None:
        """Put the optimizer's update in the place of each gradient."""
        if self.compressor.whole_model:
            grads = [param.grad for param in layout.trained if param.grad is not None]
            self.compressor.prepare(grads, [self._context(bucket) for bucket in layout.buckets])
        self._local_update()

    def _launch_rest(self, layout: Layout, used: dict[Tensor, bool] | None) -> None:
        for bucket in layout.buckets[self._launched :]:
            if bucket.in_place:
                continue
            for place, segment in enumerate(bucket.segments):
                if not self.active:
                    bucket.fill(place, None)
                elif segment.param not in self._gradients.taken or self._gradients.has_changed(segment.param):
                    self._gradients.take(segment.param, bucket, place)
        if self.compressor.whole_model and self.compressor.sends == "gradient":
            self.compressor.prepare([b.grad for b in layout.buckets], [self._context(b) for b in layout.buckets])
        while self._launched < len(layout.buckets):
            self._launch(layout.buckets[self._launched], certain=used is None)  # else some memory is to stay as it is
        divisor = self.comm.size if self.settings.op == "average" else 1
        for name, param in layout.sparse:
            if used is not None and not used[param]:
                param.grad = None
                continue
            grad = param.grad if self.active else None
            if grad is None:
                grad = torch.zeros_like(param).to_sparse(1)
            elif not grad.is_sparse:
                grad = grad.to_sparse(1)
            flight = _Flight(f"sparse gradient {name}", param)
            self._flights.append(flight)
            self._traffic.launch(flight, gather_rows(grad * self._scale, divisor))

    def _hand_out(self, used: dict[Tensor, bool] | None) -> None:
        start = time.perf_counter()
        elements, factor = 0, self.settings.gradient_predivide_factor
        for flight in self._flights:
            of, result = flight.of, flight.result
            assert result is not None
            if isinstance(of, Tensor):
                assert isinstance(result, Tensor)
                of.grad = result if factor == 1 else result * factor
                elements += of.numel()
                continue
            flags = None if used is None else [used[segment.param] for segment in of.segments]
            self._contexts[of].settle(flags)
            of.hand_out(result, flags, factor)
            elements += sum(segment.numel for segment in of.segments)
        self.telemetry.apply_seconds += time.perf_counter() - start
        self._traffic.count_step(elements)
        self.step += 1
        self._end_step()

    def _end_step(self) -> None:
        self._gradients.clear()
        self._flights, self._launched, self._stale, self._outdated = [], 0, False, False

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _lay_out(self) -> Generator[Handle, Tensor, Layout]:
        """Compare parameters, and lay out buckets by the order in which gradients became ready."""
        if self._begun:
            yield from self._traffic.through(compare(self._describe(), self.comm.rank, "parameters"))
        else:
            yield from self._begin()
        settings = self.settings
        layout = yield from self._traffic.through(
            lay_out(
                [(self.names[param], param) for param in self._trained()],
                self._kept_order or [self.names[param] for param in self._gradients.arrivals],
                self._sparse,
                self.compressor.kind,
                settings.bucket_mb,
                settings.first_bucket_mb,
                settings.groups,
            )
        )
        self._sparse |= {param for _, param in layout.sparse}
        for bucket in layout.buckets:
            # a GPU copies gradients faster than it starts as many kernels as there are parameters
            bucket.in_place = bucket.is_cpu and self.compressor.in_place(bucket.kind)
            bucket.adopt(self._kept)
            for by_name in self._kept.values():
                for segment in bucket.segments:
                    by_name.pop(segment.name, None)
        self._contexts = {}
        self._kept_order = []
        return layout

    def _begin(self) -> Generator[Handle, Tensor, None]:
        """Before the first step over this wire: do all ranks start alike?"""
        lines = [*self._describe(), *self._describe_start()]
        yield from self._traffic.through(compare(lines, self.comm.rank, "what ranks start from", REMEDY))
        weights = {name: [param] for param, name in self.names.items()}
        yield from self._traffic.through(replicas(weights, self.comm, 0, self.settings.on_divergence))
        self._begun = True

    def _drop_layout(self) -> None:
        """Take the buckets apart; what was kept for their parameters waits for the next ones."""
        self._kept = self.memory()
        self._layout = None
        self._contexts = {}

    def touched(self) -> Iterator[tuple[Segment, Tensor]]:
        """Parameters whose gradient is zero except at the positions beside them; see `Bucket.touched`."""
        for bucket in self._layout.buckets if self._layout is not None else []:
            yield from bucket.touched()

    def let_go(self) -> None:
        """The optimizer has stepped, or will not: keep no gradients alive beyond what the user does."""
        for bucket in self._layout.buckets if self._layout is not None else []:
            bucket.let_go()

    # -- what persists -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """A copy of all that is kept, by kind and parameter name."""
        memory: Memory = {kind: dict(by_name) for kind, by_name in self._kept.items()}
        for bucket in self._layout.buckets if self._layout is not None else []:
            bucket.export(memory)
        return memory

    def kept(self) -> dict[str, Any]:
        """A copy of all that `restore` takes; "shared" is what compressors keep that is the same on all ranks."""
        return {"step": self.step, "order": self.order(), "memory": self.memory(), "shared": copied(self._shared)}

    def order(self) -> list[str]:
        """Parameter names in the order of the buckets; empty before the first step."""
        return list(self._layout.order) if self._layout is not None else list(self._kept_order)

    def restore(self, memory: Memory, order: list[str], step: int, shared: Memory) -> None:
        """Take over what `memory`, `order`, `step` and `shared` were; buckets are laid out anew at the next step.

        Gradients that have come in and were not sent stay where they are; their passes are counted anew. Raises
        ConfigError if some were sent, or for memory of a parameter that does not exist or fit.
        """
        if self.comm.elastic:
            self.abandon()  # the step that failed, on all ranks
        if self._launched or self._driver is not None:
            raise ConfigError("state cannot be loaded between backward() and step(): finish the step first")
        shapes = {name: param.shape for param, name in self.names.items()}
        for kind, by_name in memory.items():
            for name, tensor in by_name.items():
                if name not in shapes:
                    raise ConfigError(f"the state holds {kind} of parameter {name!r}, unknown to this optimizer")
                if tensor.shape != shapes[name]:
                    raise ConfigError(
                        f"the state holds {kind} of shape {tuple(tensor.shape)} for parameter {name!r}, which has "
                        f"shape {tuple(shapes[name])}"
                    )
        self._gradients.clear()
        self._layout = None
        self._contexts = {}
        self._kept = copied(memory)
        self._kept_order = list(order)
        self._shared = copied(shared)
        self.step = step

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0.0 for compressors that hold nothing back."""
        parts = list(self._kept.get("residual", {}).values())
        if self._layout is not None:
            parts += [bucket.memory["residual"] for bucket in self._layout.buckets if "residual" in bucket.memory]
        norms = [torch.linalg.vector_norm(part.float()).cpu() for part in parts]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
