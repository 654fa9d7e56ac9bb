"""Any compressor inside torch's DistributedDataParallel, as a communication hook.

DDP calls the hook once per bucket, in one order on all ranks, while backward runs. Each call takes the bucket's
gradients and starts their exchange up to its first collective. The call for the last bucket finishes the step: a vote
(`dgcopt.exchange.vote`), then all exchanges in bucket order (`dgcopt.exchange.flights`), then the results in DDP's own
memory.
"""

import copy
import dataclasses
import functools
import logging
import math
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm import Comm, Handle, current_comm
from ..compressors import Compressor, Context, NoCompression, accept
from ..compressors.own_step import updates_add_up
from ..compressors.sparse_rows import gather_rows
from ..errors import ConfigError
from ..exchange.agreement import compare
from ..exchange.flights import Flight, Traffic, context_of, exchange_of
from ..exchange.parameters import check_trainable, describe, describe_groups, given_names, inner_optimizer, unique_names
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, used_anywhere, vote
from ..flat.buckets import Bucket, Memory, build_buckets, copied
from ..flat.segments import LocalGradient, SparseSum
from ..version import __version__
from .optimizer import _Distributed

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookState", "ddp_hook", "exchange_bucket"]

log = logging.getLogger("dgcopt")

Hook = Callable[["HookState", GradBucket], Future[Tensor]]


def ddp_hook(
    compressor: "Compressor | HookState | Any" = None,
    optimizer: Optimizer | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    comm: Comm | None = None,
    scaler: Any = None,
) -> tuple["HookState", Hook]:
    """What `DistributedDataParallel.register_comm_hook` takes, so that gradients travel as `compressor` says.

        ddp_model.register_comm_hook(*dgcopt.ddp_hook(dgcopt.DGC(ratio=0.001), optimizer))

    Args:
        compressor: how gradients travel; None sends them as they are. The hook takes a copy of its own. Or a
            `HookState` that was restored, which is given here what could not be stored with it.
        optimizer: the optimizer that steps the model's parameters, not wrapped by dgcopt. DGC takes momentum and
            weight decay over from SGD then, as its paper wants. Without it, DGC is plain error feedback in front of the
            optimizer's own momentum. If the optimizer is made later: `state.attach(optimizer)`.
        named_parameters: `model.named_parameters()`, for errors and stored state that name parameters. None numbers
            them, by the optimizer's groups or else in the order in which DDP's first buckets hold them.
        comm: the wire; None is the one of `dgcopt.init()`. It must join the ranks of DDP's process group.
        scaler: the `torch.amp.GradScaler` of the loop. What compressors keep is then free of its scale, which changes;
            without it, what is held back when the scale changes counts too much or too little.

    Costs what the compressor costs; 12 bytes per step and other rank for the vote; and one pass over the gradients,
    which tells whether they are finite. If they are not on any rank, every rank's gradients become NaN, so that scalers
    skip the step alike, and no memory changes. In DDP's `join()` averages divide as it says: by all ranks or, with
    `divide_by_initial_world_size=False`, by those that have data. In a single process DDP is left as it is. A parameter
    whose gradient is zero on all ranks is left alone, with what is held back of it, because DDP throws away what
    arrives for a parameter that was not used.

    Raises ConfigError for compressors that send updates (DDP exchanges gradients), a distributed optimizer, or names
    that do not fit. In backward passes: MismatchError, on all ranks, if they differ in compressor, settings or
    parameters; what the wire raises, such as TimeoutExceeded, naming rank and bucket; ConfigError if a restored state
    does not belong to this rank or model.
    """
    state = compressor if isinstance(compressor, HookState) else HookState(compressor)
    state._given = given_names(named_parameters) or state._given
    state._comm = comm or state._comm
    state._scaler = scaler if scaler is not None else state._scaler
    if optimizer is not None:
        state.attach(optimizer)
    return state, exchange_bucket


def exchange_bucket(state: "HookState", bucket: GradBucket, *_: Tensor) -> Future[Tensor]:
    """The hook: takes one of DDP's buckets, and returns a future of its averaged gradients.

    Raises ConfigError for what FullyShardedDataParallel hands to its hooks.
    """
    if isinstance(bucket, Tensor):
        raise ConfigError(
            "ddp_hook is for DistributedDataParallel, and this is the gradient of a FullyShardedDataParallel module: "
            "sharded parameters are not supported yet. Put the plain module in DistributedDataParallel"
        )
    return state._exchange(bucket)


@dataclasses.dataclass(eq=False)
class _Part:
    """Parameters of one DDP bucket that travel together: `places` in that bucket, and what persists of them.

    `shift` is what each segment's positions are moved by to be those in DDP's buffer; None where DDP lays out some
    parameter's elements in another order.
    """

    bucket: Bucket
    context: Context
    places: list[int]
    starts: Tensor
    shift: Tensor | None


@dataclasses.dataclass(eq=False)
class _Flight(Flight):
    """One exchange of this step: its gradients in DDP's `buffer`, and their sums. No `part` if they are sparse."""

    part: _Part | None
    buffer: Tensor
    grads: list[Tensor]
    sums: Tensor


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
        self._kept: Memory = {}
        self._shared: Memory = {}
        self._saved: dict[str, Any] | None = None
        self._given: dict[Tensor, str] | None = None
        self._names: dict[Tensor, str] = {}
        self._optimizer: Optimizer | None = None
        self._hooks: list[Any] = []
        self._scaler: Any = None
        self._scale = 1.0
        self._share = 1.0
        self._comm: Comm | None = None
        self._layout: dict[tuple[str, ...], list[_Part]] = {}
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._flights: list[_Flight] = []
        self._arrived: list[tuple[Tensor, list[_Flight], Future[Tensor]]] = []

    @property
    def comm(self) -> Comm:
        """The wire: given, or that of `dgcopt.init()`, joined when it is first needed."""
        return self._traffic.comm

    @functools.cached_property
    def _traffic(self) -> Traffic:
        self._comm = self._comm or current_comm()
        return Traffic(self._comm, self.telemetry, "ddp_hook")

    # -- what persists -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of what this rank keeps, in plain tensors and numbers."""
        memory: Memory = {kind: dict(by_name) for kind, by_name in self._kept.items()}
        for parts in self._layout.values():
            for part in parts:
                part.bucket.export(memory)
        known = {name: list(param.shape) for param, name in self._names.items()}
        saved = self._saved or {}
        return {
            "rank": self._comm.rank if self._comm is not None else saved.get("rank"),
            "world_size": self._comm.size if self._comm is not None else saved.get("world_size"),
            "step": self.step,
            "shapes": known or saved.get("shapes", {}),
            "attached": self._optimizer is not None or saved.get("attached", False),
            "memory": memory,
            "shared": copied(self._shared),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, between steps. The next backward pass checks that it belongs here."""
        self._layout = {}
        self._kept = copied(state["memory"])
        self._shared = copied(state["shared"])
        self._saved = {key: state[key] for key in ("rank", "world_size", "shapes", "attached")}
        self.step = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self.compressor, **self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.compressor = state["compressor"]
        self._start()
        self.load_state_dict(state)

    # -- around the optimizer's step ---------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Let the compressor take over from the optimizer what it can, before the first backward pass.

        Another one of the same parameters takes the place of the one before. Of what Accelerate, Lightning or Fabric
        put around an optimizer, the one inside is taken, which they step.
        """
        optimizer = inner_optimizer(optimizer)
        if isinstance(optimizer, _Distributed):
            raise ConfigError("the optimizer exchanges gradients by itself: give ddp_hook the one that is not wrapped")
        others = self._optimizer is not None and _parameters_of(self._optimizer) != _parameters_of(optimizer)
        if others or self._layout:
            raise ConfigError("attach one optimizer, before the first backward pass")
        numbered = unique_names(optimizer, None)
        check_trainable({param: (self._given or {}).get(param, name) for param, name in numbered.items()})
        while self._hooks:
            self._hooks.pop().remove()
        self._optimizer = optimizer
        self._given = self._given or numbered
        self.compressor.attach(optimizer)
        if self._would_send_updates and updates_add_up(optimizer):
            log.info(
                "dgcopt: gradients travel, and %s's moments see only what has arrived of them; in place of DDP, "
                "dgcopt.DistributedOptimizer sends the updates that it makes of whole ones",
                type(optimizer).__name__,
            )
        # until the attached one has stepped, look at what others do
        self._watch = register_optimizer_step_post_hook(functools.partial(_after_any_step, weakref.ref(self)))
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            self._watch,
        ]

    def _notice(self, other: Optimizer) -> None:
        """Raises ConfigError if, in place of the attached optimizer, another one has stepped: as one made anew does."""
        if self._layout and not _parameters_of(other).isdisjoint(self._names):
            raise ConfigError(
                f"an optimizer ({type(other).__name__}) has stepped parameters of DDP that is not the one which "
                f"ddp_hook knows, and that one has never stepped: what compressors take over from it, such as "
                f"momentum, would be applied twice. Give ddp_hook the optimizer that steps, or call "
                f"state.attach(optimizer) with it before the first backward pass."
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs `Compressor.before_step` once gradients are there: now, or when the closure has made them."""
        self._watch.remove()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._use_gradients()
            return None

        def closure_then_compressor() -> Any:
            loss = closure()
            self._use_gradients()
            return loss

        if len(args) > 1:
            return (args[0], closure_then_compressor, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_compressor}

    def _use_gradients(self) -> None:
        assert self._optimizer is not None
        if self.comm.size > 1:
            for param in self.compressor.before_step(self._optimizer) or ():
                self._hidden.append((param, param.grad))
                param.grad = None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        if self.comm.size > 1:
            self.compressor.after_step(optimizer)

    # -- during backward ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._check_rank()
        if self.comm.size == 1:
            future.set_result(buffer)
            return future
        try:
            if bucket.index() == 0:
                self._forget()  # a backward pass that failed half-way
                self._scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
            flights = self._flights_of(bucket)
            self._arrived.append((buffer, flights, future))
            for flight in flights:
                self._flights.append(flight)
                if self.compressor.overlap and not self.compressor.whole_model:
                    self._launch(flight)
            if bucket.is_last():
                self._traffic.drive(self._finish())
        except Exception:
            self._forget()
            raise
        return future

    def _flights_of(self, bucket: GradBucket) -> list[_Flight]:
        """The exchanges of one DDP bucket, whose gradients are ready."""
        params, buffer = bucket.parameters(), bucket.buffer()
        for param in params:
            if param not in self._names:
                self._names[param] = self._name(param)
        names = tuple(self._names[param] for param in params)
        if names not in self._layout:
            self._layout[names] = self._lay_out(bucket, names)
        if buffer.is_sparse:
            label = f"sparse gradient {names[0]}"
            return [_Flight(label, None, buffer, [buffer], _sums([buffer]))]
        grads, flights = bucket.gradients(), []
        for part in self._layout[names]:
            mine = [grads[place] for place in part.places]
            flights.append(_Flight(part.bucket.label, part, buffer, mine, self._fill(part.bucket, mine)))
        return flights

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

    def _lay_out(self, bucket: GradBucket, names: tuple[str, ...]) -> list[_Part]:
        """Lay out one DDP bucket, after comparing it over ranks; what is kept of its parameters moves here."""
        self._check(dict(zip(bucket.parameters(), names, strict=True)))
        comm, params, buffer = self.comm, bucket.parameters(), bucket.buffer()
        by_name = dict(zip(params, names, strict=True))
        lines = describe(
            self._optimizer,  # type: ignore[arg-type]  # of which only the class is told
            by_name,
            {"compression": self.compressor, "scaler": self._scaler is not None},
            __version__,
        )
        lines += describe_groups(self._optimizer) if self._optimizer is not None else []
        self._traffic.drive(self._traffic.through(compare(lines, comm.rank, "settings of ddp_hook")))
        for others in [key for key in self._layout if not set(key).isdisjoint(names)]:  # as DDP had them before
            for part in self._layout.pop(others):
                part.bucket.export(self._kept)
        if buffer.is_sparse:
            return []
        named = [(name, param) for param, name in by_name.items() if param.numel()]
        parts: list[_Part] = []
        grads = bucket.gradients()
        for made in build_buckets(named, self.compressor.kind, 2**62, 2**62) if named else []:
            laid = dataclasses.replace(made, index=len(self._flights) + len(parts))
            laid.adopt(self._kept)
            places = [names.index(segment.name) for segment in laid.segments]
            offsets = [grads[place].storage_offset() - buffer.storage_offset() for place in places]
            flat = all(
                segment.flatten(grads[place]).data_ptr() == grads[place].data_ptr()
                for segment, place in zip(laid.segments, places, strict=True)
            )
            starts = torch.tensor([segment.start for segment in laid.segments], device=buffer.device)
            shift = torch.tensor(offsets, device=buffer.device) - starts if flat else None
            laid.in_place = laid.is_cpu and not self.compressor.whole_model and self.compressor.in_place(laid.kind)
            context = context_of(laid, comm, "average", self._shared)
            parts.append(_Part(laid, context, places, starts, shift))
        for by_kind in self._kept.values():
            for name in names:
                by_kind.pop(name, None)
        return parts

    def _check_rank(self) -> None:
        """Raises ConfigError if what was restored is another rank's."""
        saved, comm = self._saved or {}, self.comm
        if saved.get("rank") is not None and (saved["rank"], saved["world_size"]) != (comm.rank, comm.size):
            raise ConfigError(
                f"this state of ddp_hook belongs to rank {saved['rank']} of {saved['world_size']} and cannot be used "
                f"on rank {comm.rank} of {comm.size}: each rank keeps what it has not sent yet. Let every rank save "
                f"and load a file of its own, or begin with a new ddp_hook, which loses what was held back."
            )

    def _check(self, names: dict[Tensor, str]) -> None:
        """Raises ConfigError for parameters that cannot be averaged, or that a restored state does not fit."""
        check_trainable(names)
        if self._optimizer is not None:
            stepped = _parameters_of(self._optimizer)
            for param, name in names.items():
                if param not in stepped:
                    raise ConfigError(
                        f"DDP trains parameter {name!r}, which is not in the optimizer given to ddp_hook: give it the "
                        f"optimizer of the whole model, or none"
                    )
        saved = self._saved
        if saved is None:
            return
        if saved["attached"] and self._optimizer is None:
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

    def _fill(self, laid: Bucket, grads: list[Tensor]) -> Tensor:
        """Copy gradients into their bucket, if they do not stay where DDP has them; returns their sums."""
        if laid.in_place:
            return _sums(grads)
        sums = torch.stack([laid.fill(place, grad) for place, grad in enumerate(grads)])
        if self._factor != 1:
            laid.grad.mul_(self._factor)
        return sums

    def _launch(self, flight: _Flight, certain: bool = False) -> None:
        if flight.part is None:
            self._traffic.launch(flight, gather_rows(flight.buffer * self._factor, self.comm.size))
            return
        context, laid = flight.part.context, flight.part.bucket
        context.step, context.certain, context.index = self.step, certain, self._flights.index(flight)
        if laid.in_place:
            parts = [segment.flatten(grad) for segment, grad in zip(laid.segments, flight.grads, strict=True)]
            context.local = LocalGradient(laid.segments, parts, self._factor)
        self._traffic.launch(flight, exchange_of(laid, self.compressor, context))

    # -- at the end of the step --------------------------------------------------------------------------------------

    def _finish(self) -> Generator[Handle, Tensor, None]:
        """Every bucket is here: finish all exchanges, and let DDP have their results."""
        for kind, by_name in self._kept.items():
            for name in by_name:
                raise ConfigError(
                    f"the restored state of ddp_hook holds {kind} of parameter {name!r}, which DDP does not train: "
                    f"build the same model, or name its parameters (named_parameters)"
                )
        self._saved = None
        sums = [total for flight in self._flights for total in flight.sums.tolist()]
        grads = [grad for flight in self._flights for grad in flight.grads]
        # a sum tells nearly always; finite numbers may have an infinite one, and others than zero may add up to it
        finite = all(math.isfinite(s) or bool(_values(g).isfinite().all()) for s, g in zip(sums, grads, strict=True))
        used = [s != 0 or bool(_values(g).any()) for s, g in zip(sums, grads, strict=True)]
        order = "\n".join(name for names in self._layout for name in names)
        served = _served_without_data()
        ballot = Ballot(
            active=served is None,
            finite=finite,
            stale=False,
            prepared=True,
            complete=all(used),
            final=True,
            step=self.step,
            trained=zlib.crc32(order.encode()),
            launched=len(self._flights),
            by_active=served is not None and not served._divide_by_initial_world_size,
        )
        traffic = self._traffic
        verdict = yield from traffic.through(vote(ballot, "vote"))
        if not verdict.alike:
            yield from traffic.through(compare(order.split("\n"), self.comm.rank, "DDP's buckets"))
        if verdict.void:
            yield from traffic.call_off(self._flights)
            self._make_void(verdict.void)
        else:
            share = self.comm.size / verdict.active if verdict.by_active else 1.0
            if share != self._share:
                self._share = share
                yield from self._take_back()
            if verdict.complete:
                used = [True] * len(used)
            else:
                used = (yield from traffic.through(used_anywhere(used, "gradients that there are"))).tolist()
            self._launch_rest(certain=verdict.complete)
            yield from traffic.finish(self._flights, self.compressor.in_turn)
            self._settle(used)
        for buffer, flights, future in self._arrived:
            result = flights[0].result if buffer.is_sparse and not verdict.void else buffer
            future.set_result(result)  # type: ignore[arg-type]  # a tensor, as sparse gradients are gathered whole
        self._forget()

    def _take_back(self) -> Generator[Handle, Tensor, None]:
        """Undo what was launched before it was known by how many ranks averages divide; all ranks do."""
        self.telemetry.repeated += any(flight.exchange is not None for flight in self._flights)
        yield from self._traffic.call_off(self._flights)
        for flight in self._flights:
            flight.exchange = flight.handle = flight.result = None
            flight.rounds.clear()
            if flight.part is not None:
                flight.part.context.roll_back()
                self._fill(flight.part.bucket, flight.grads)

    def _make_void(self, ranks: list[int]) -> None:
        """Gradients of `ranks` are not finite: memory stays what it was, and DDP is given NaN on every rank."""
        self.telemetry.skipped += 1
        log.log(
            logging.WARNING if self._scaler is None else logging.INFO,  # loss scaling brings it about
            "dgcopt: step %d: NaN or Inf in the gradients of rank(s) %s; nothing is averaged",
            *(self.step, ranks),
        )
        for buffer, *_ in self._arrived:
            _values(buffer).fill_(torch.nan)

    def _launch_rest(self, certain: bool) -> None:
        waiting = [flight for flight in self._flights if flight.exchange is None]
        if self.compressor.whole_model and waiting:
            parts = [flight.part for flight in waiting if flight.part is not None]
            self.compressor.prepare([part.bucket.grad for part in parts], [part.context for part in parts])
        for flight in waiting:
            self._launch(flight, certain)

    def _settle(self, used: list[bool]) -> None:
        """The step succeeded: write results into DDP's memory, and keep what was held back."""
        start, left, elements = time.perf_counter(), iter(used), 0
        for flight in self._flights:
            flags = [next(left) for _ in flight.grads]
            if flight.part is None:
                assert isinstance(flight.result, Tensor)
                flight.result = flight.result * self._scale
            else:
                self._write(flight, flags)
            elements += sum(grad.numel() for grad in flight.grads)
        self.telemetry.apply_seconds += time.perf_counter() - start
        self._traffic.count_step(elements)
        self.step += 1

    def _write(self, flight: _Flight, used: list[bool]) -> None:
        part, result, scale = flight.part, flight.result, self._scale
        assert part is not None and result is not None
        laid, local = part.bucket, part.context.local
        part.context.settle(None if all(used) else used)
        if isinstance(result, SparseSum) and part.shift is None:
            result = result.add_to(laid.grad.zero_())
        if isinstance(result, SparseSum):
            assert part.shift is not None
            for segment, grad in zip(laid.segments, flight.grads, strict=True):
                if local is None or not local.is_clear(segment):
                    grad.zero_()
            for positions, values in result.messages:
                there = positions + part.shift[torch.searchsorted(part.starts, positions, right=True) - 1]
                flight.buffer.index_add_(0, there, (values * scale).to(flight.buffer.dtype))
        else:
            for segment, grad in zip(laid.segments, flight.grads, strict=True):
                grad.copy_(segment.view(result))
                if scale != 1:
                    grad.mul_(scale)
        for grad, was_used in zip(flight.grads, used, strict=True):
            if not was_used:
                grad.zero_()

    def _forget(self) -> None:
        """The step is over, or failed: what it has not settled is rolled back."""
        for flight in self._flights:
            if flight.part is not None:
                flight.part.context.roll_back()
        self._flights, self._arrived = [], []


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


def _parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _after_any_step(attached: "weakref.ref[HookState]", other: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs after every optimizer's step, until the attached one has made its first."""
    state = attached()
    if state is not None and other is not state._optimizer:
        state._notice(other)


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


def _sums(grads: list[Tensor]) -> Tensor:
    """Each gradient's sum, in float32 at least: NaN or Inf if any element is."""
    return torch.stack([_values(grad).sum(dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads])
