"""Exchanges in flight: when they start, in which order they go on, when they are done, and what they cost.

Buckets are launched in one fixed order on all ranks, each as soon as its gradients are ready and its predecessor was
launched, and run to their first collective while backward goes on. `synchronize` then takes them round by round, in
bucket order: round two of the first bucket is on its way while round one of the second is still awaited. No order
depends on timing, because torch.distributed and MPI match collectives by order.

The first step only watches. Its gradients say in which order they become ready and which are sparse; the ranks agree
on rank 0's order, and buckets are laid out by it. The same happens when parameters are added, frozen or unfrozen.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .buckets import Bucket, Memory, build_buckets
from .collectives import AllReduce, Broadcast, Collective, Exchange
from .comm import Comm, Handle
from .compressors import Compressor, Context
from .compressors.sparse_rows import gather_rows
from .errors import ConfigError

__all__ = ["Engine", "Telemetry"]


@dataclass
class Telemetry:
    """What was sent and how long it took, on this rank, added up over all steps.

    Attributes:
        steps: exchanges of the whole model.
        payload_bytes: bytes of this rank's messages.
        sent_bytes: bytes that this rank put on the wire, by the bandwidth-optimal algorithm of each collective.
        dense_bytes: what a ring allreduce of the same gradients in float32 would have put there.
        compress_seconds: making messages. wait_seconds: waiting for other ranks. apply_seconds: reading messages.
    """

    steps: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    compress_seconds: float = 0.0
    wait_seconds: float = 0.0
    apply_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense float32; 1.0 before anything was sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass(eq=False)
class _Flight:
    """One exchange on its way: the generator, and the collective that it waits for."""

    exchange: Exchange
    label: str
    bucket: Bucket | None
    param: Tensor | None = None
    round: int = 0
    handle: Handle | None = None
    result: Tensor | None = None


@dataclass(eq=False)
class _Layout:
    """Which gradients travel how: dense ones in buckets, sparse ones each on its own."""

    trained: list[int]
    order: list[str]
    buckets: list[Bucket]
    sparse: list[tuple[str, Tensor]]
    place: dict[Tensor, tuple[Bucket, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            for place, segment in enumerate(bucket.segments):
                self.place[segment.param] = (bucket, place)


class Engine:
    """The exchanges of one optimizer's gradients on one rank.

    Args:
        names: every parameter and its unique name, in an order that is the same on all ranks.
        compressor: how gradients travel.
        comm: the wire.
        op: "average" or "sum" over ranks.
        bucket_bytes, first_bucket_bytes: when a bucket is full.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        compressor: Compressor,
        comm: Comm,
        op: Literal["average", "sum"],
        bucket_bytes: int,
        first_bucket_bytes: int,
    ) -> None:
        self.names = names
        self.compressor = compressor
        self.comm = comm
        self.op: Literal["average", "sum"] = op
        self.bucket_bytes = bucket_bytes
        self.first_bucket_bytes = first_bucket_bytes
        self.telemetry = Telemetry()
        self.step = 0
        self._layout: _Layout | None = None
        self._kept: Memory = {}
        self._kept_order: list[str] = []
        self._begun = False
        self._seen: dict[Tensor, None] = {}
        self._filled: dict[Bucket, int] = {}
        self._contexts: dict[Bucket, Context] = {}
        self._launched = 0
        self._flights: list[_Flight] = []
        self._driver: Generator[Handle, Tensor, None] | None = None
        self._awaited: Handle | None = None
        self._finished_by_others = False
        self._number = comm.attend(self._progress)

    # -- during backward ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether gradients of a step have come in that `synchronize` has not finished."""
        return bool(self._seen)

    def is_in(self, param: Tensor) -> bool:
        """Whether this step already has the parameter's gradient."""
        return param in self._seen

    @torch.no_grad()
    def ready(self, param: Tensor) -> None:
        """Take in a gradient that is final for this step, and launch what can be launched."""
        self._begin()
        self._seen[param] = None
        if self._layout is None:
            return
        if param in self._layout.place:
            bucket, place = self._layout.place[param]
            bucket.fill(place, param.grad)
            self._filled[bucket] = self._filled.get(bucket, 0) + 1
        if self.compressor.whole_model:
            return
        try:
            for bucket in self._layout.buckets[self._launched :]:
                if self._filled.get(bucket, 0) < len(bucket.segments):
                    break
                self._launch(bucket)
        except Exception:
            self._abandon()
            raise

    def _begin(self) -> None:
        """At the first gradient of a step: notice that other parameters are trained than last time."""
        if self._begun:
            return
        self._begun = True
        if self._layout is not None and self._layout.trained != [id(param) for param in self._trained()]:
            self._drop_layout()

    def _trained(self) -> list[Tensor]:
        return [param for param in self.names if param.requires_grad and param.numel()]

    # -- launching and advancing -------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        exchange = self.compressor.exchange(bucket.grad, self._context(bucket))
        flight = _Flight(_lowered(exchange, self.comm), bucket.label, bucket)
        self._flights.append(flight)
        self._advance(flight, None)

    def _context(self, bucket: Bucket) -> Context:
        context = self._contexts.get(bucket)
        if context is None:
            context = self._contexts[bucket] = Context(
                self.comm.rank, self.comm.size, self.op, self.step, bucket.kind, bucket.segments, bucket.memory
            )
        context.step = self.step
        return context

    @torch.no_grad()
    def _advance(self, flight: _Flight, result: Tensor | None) -> None:
        """Run an exchange to its next collective, and start that; or to its end."""
        start = time.perf_counter()
        try:
            collective = flight.exchange.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            flight.handle, flight.result = None, stop.value
            if not isinstance(stop.value, Tensor):
                raise ConfigError(
                    f"{type(self.compressor).__name__}.exchange must return the averaged gradient as a tensor, not "
                    f"{type(stop.value).__name__}"
                ) from None
            self.telemetry.apply_seconds += time.perf_counter() - start
            return
        collective.label = f"optimizer {self._number} {flight.label} round {flight.round}"
        flight.round += 1
        flight.handle = self._start(collective)
        elapsed = time.perf_counter() - start
        if flight.round == 1:
            self.telemetry.compress_seconds += elapsed
        else:
            self.telemetry.apply_seconds += elapsed

    def _start(self, collective: Collective) -> Handle:
        """The one place where collectives leave, and their bytes are counted."""
        self.telemetry.payload_bytes += collective.nbytes
        self.telemetry.sent_bytes += collective.sent(self.comm.size_of(collective.group))
        return self.comm.start(collective)

    # -- at the end of the step --------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Finish the exchange of every gradient; afterwards each `param.grad` is the averaged one.

        Gradients that are missing count as zero. Raises what the wire raises, naming rank and bucket; the step is
        lost then, memory included.
        """
        if self._finished_by_others:
            self._finished_by_others = False
            return
        if self._driver is None:
            self._driver, self._awaited = self._drive(), None
        try:
            while True:
                start = time.perf_counter()
                result = self.comm.wait(self._awaited) if self._awaited is not None else None
                self.telemetry.wait_seconds += time.perf_counter() - start
                self._awaited = self._driver.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            self._driver = None
        except Exception:
            self._abandon()
            raise

    def _progress(self) -> None:
        """Go on as far as possible without waiting, once this step's gradients have come in."""
        if self._driver is None:
            if not self._seen:
                return
            self._driver, self._awaited = self._drive(), None
        try:
            while self._awaited is None or self._awaited.done():
                result = None if self._awaited is None else self.comm.wait(self._awaited)
                self._awaited = self._driver.send(result)  # type: ignore[arg-type]
        except StopIteration:
            self._driver = None
            self._finished_by_others = True

    def _abandon(self) -> None:
        """Forget a step that failed, so that the error is the last word about it."""
        self._driver = None
        self._end_step()

    @torch.no_grad()
    def _drive(self) -> Generator[Handle, Tensor, None]:
        """Everything that is left of the step; yields handles to wait for, is sent their results."""
        self._begin()
        new = self._layout is None
        if self._layout is None:
            self._layout = yield from self._agree_on_layout()
        layout = self._layout
        for bucket in layout.buckets[self._launched :]:
            for place, segment in enumerate(bucket.segments):
                if new or segment.param not in self._seen:
                    bucket.fill(place, segment.param.grad)
        if self.compressor.whole_model:
            self.compressor.prepare([b.grad for b in layout.buckets], [self._context(b) for b in layout.buckets])
        while self._launched < len(layout.buckets):
            self._launch(layout.buckets[self._launched])
        divisor = self.comm.size if self.op == "average" else 1
        for name, param in layout.sparse:
            grad = param.grad
            if grad is None:
                grad = torch.zeros_like(param).to_sparse(1)
            elif not grad.is_sparse:
                grad = grad.to_sparse(1)
            flight = _Flight(gather_rows(grad, divisor), f"sparse gradient {name}", None, param)
            self._flights.append(flight)
            self._advance(flight, None)

        while any(flight.handle is not None for flight in self._flights):
            for flight in self._flights:
                if flight.handle is not None:
                    self._advance(flight, (yield flight.handle))
        self._hand_out()

    def _hand_out(self) -> None:
        start = time.perf_counter()
        elements = 0
        for flight in self._flights:
            assert flight.result is not None
            if flight.bucket is None:
                assert flight.param is not None
                flight.param.grad = flight.result
                elements += flight.param.numel()
                continue
            bucket, result = flight.bucket, flight.result
            if result.shape != bucket.grad.shape:
                raise ConfigError(
                    f"{type(self.compressor).__name__} returned shape {tuple(result.shape)} for the flat gradient of "
                    f"shape {tuple(bucket.grad.shape)} of {bucket.label}"
                )
            bucket.hand_out(result if result.dtype == bucket.grad.dtype else bucket.grad.copy_(result))
            elements += sum(segment.numel for segment in bucket.segments)
        self.telemetry.apply_seconds += time.perf_counter() - start
        self.telemetry.steps += 1
        self.telemetry.dense_bytes += 2 * 4 * elements * (self.comm.size - 1) // self.comm.size
        self.step += 1
        self._end_step()

    def _end_step(self) -> None:
        self._flights, self._seen, self._filled, self._launched, self._begun = [], {}, {}, 0, False

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _agree_on_layout(self) -> Generator[Handle, Tensor, _Layout]:
        """Lay out buckets by the order in which rank 0's gradients became ready."""
        trained = self._trained()
        names = [self.names[param] for param in trained]
        wanted = self._kept_order or [self.names[p] for p in self._seen]
        place = {name: i for i, name in enumerate(wanted)}
        last = len(place)
        # what rank 0 has not seen comes after what it has, the last parameter first, as backward would
        order = sorted(range(len(names)), key=lambda i: (place.get(names[i], last), -i))
        agreed = Broadcast(torch.tensor(order, dtype=torch.int64), label=f"optimizer {self._number} order of gradients")
        sparse = torch.tensor([p.grad is not None and p.grad.is_sparse for p in trained], dtype=torch.int32)
        results = []
        for collective in (
            agreed,
            AllReduce(sparse, op="max", label=f"optimizer {self._number} sparse gradients"),
        ):
            collective.tensor = self.comm.to_wire(collective.tensor)
            results.append((yield self._start(collective)).tolist())
        ordered = [(names[i], trained[i]) for i in results[0]]
        is_sparse = {names[i] for i, flag in enumerate(results[1]) if flag}
        dense = [(name, param) for name, param in ordered if name not in is_sparse]
        buckets = build_buckets(dense, self.compressor.kind, self.bucket_bytes, self.first_bucket_bytes)
        for bucket in buckets:
            bucket.adopt(self._kept)
            for by_name in self._kept.values():
                for segment in bucket.segments:
                    by_name.pop(segment.name, None)
        self._contexts = {}
        self._kept_order = []
        sparse_ones = [(name, param) for name, param in ordered if name in is_sparse]
        return _Layout([id(param) for param in trained], [name for name, _ in ordered], buckets, sparse_ones)

    def _drop_layout(self) -> None:
        """Take the buckets apart; what was kept for their parameters waits for the next ones."""
        self._kept = self.memory()
        self._layout = None
        self._contexts = {}

    # -- what persists -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """A copy of all that is kept, by kind and parameter name."""
        memory: Memory = {kind: dict(by_name) for kind, by_name in self._kept.items()}
        for bucket in self._layout.buckets if self._layout is not None else []:
            bucket.export(memory)
        return memory

    def order(self) -> list[str]:
        """Parameter names in the order of the buckets; empty before the first step."""
        return list(self._layout.order) if self._layout is not None else list(self._kept_order)

    def restore(self, memory: Memory, order: list[str], step: int) -> None:
        """Take over what `memory`, `order` and `step` were; buckets are laid out anew at the next step.

        Raises ConfigError in the middle of a step, or for memory of a parameter that does not exist or fit.
        """
        if self.in_flight:
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
        self._layout = None
        self._contexts = {}
        self._kept = {kind: {n: t.detach().clone() for n, t in by_name.items()} for kind, by_name in memory.items()}
        self._kept_order = list(order)
        self.step = step

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0.0 for compressors that hold nothing back."""
        parts = list(self._kept.get("residual", {}).values())
        if self._layout is not None:
            parts += [bucket.memory["residual"] for bucket in self._layout.buckets if "residual" in bucket.memory]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32).cpu() for part in parts]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _lowered(exchange: Exchange, comm: Comm) -> Exchange:
    """The same exchange in collectives that the wire's library has."""
    result: Tensor | None = None
    while True:
        try:
            collective = exchange.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            return stop.value
        result = (yield collective) if comm.supports(collective) else (yield from comm.emulate(collective))
