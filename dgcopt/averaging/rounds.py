"""One rank's part in averaging: it hooks into the optimizer's step, and carries out what the algorithm yields.

After each local step the algorithm says whether an exchange is due. If so, a copy of the weights goes on its way,
bucket by bucket, and nothing changes before all of it has arrived: a wire that fails leaves weights and memory as the
local steps have made them. Where all ranks meet anyway they vote first, or beside an exchange that overlaps with
training: are the weights of all finite, do all train the same parameters, who still has data?

On the simulated wire, where ranks take turns, no rank can wait for the others in its own step: the last one to step
takes the exchange to its end for all of them.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import STATE_KEY
from ..collectives import AllReduce, Collective
from ..comm import Comm, Handle, current_comm
from ..compressors.own_step import check_steps_alone
from ..errors import CommError, ConfigError, DivergenceError, MismatchError
from ..exchange.agreement import compare
from ..exchange.divergence import replicas
from ..exchange.flights import Flight, Traffic, context_of
from ..exchange.parameters import check_trainable, describe, given_names, number, unique_names
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, vote
from ..flat.buckets import Bucket, Memory, build_buckets, copied
from ..gradients.optimizer import DistributedOptimizer, _Distributed
from ..version import __version__
from .base import Averaging
from .weights import Weights

__all__ = ["Rounds", "is_finite"]

BUCKET_BYTES = 25 * 2**20
KEY = "averaging"
"""Where `optimizer.state_dict()` keeps what is here."""


@dataclass(eq=False)
class _Flight(Flight):
    """The exchange of one bucket's weights."""

    of: Bucket


class Rounds:
    """What `optimizer.averaging` is: the averaging of one optimizer's weights on one rank.

    Attributes: `rule`, the algorithm; `comm`, the wire; `step`, local steps made so far, warm-up included.
    """

    def __init__(
        self,
        rule: Averaging,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        comm: Comm | None,
    ) -> None:
        if hasattr(optimizer, KEY):
            raise ConfigError(f"this optimizer is averaged by {getattr(optimizer, KEY).rule!r} already: wrap it once")
        self._given = given_names(named_parameters) or {}
        self.names = unique_names(optimizer, self._given)
        check_trainable(self.names)
        check_steps_alone(optimizer, f"{type(rule).__name__} averages weights that it has moved")
        self.rule = rule
        self.optimizer = optimizer
        self.step = 0
        comm = current_comm() if comm is None else comm
        if not rule.warmup_steps and comm.size > 1 and getattr(optimizer, "comm", None) is comm:
            raise ConfigError(
                f"this optimizer averages gradients over all ranks at every step, so there is nothing left for "
                f"{type(rule).__name__}: give it the bare optimizer, or one with a process_set of fewer ranks, or set "
                f"warmup_steps"
            )
        self._join_wire(comm)
        if rule.warmup_steps and not isinstance(optimizer, _Distributed):
            DistributedOptimizer(optimizer, [(name, param) for param, name in self.names.items()], comm=self.comm)
        self._scales_itself = bool(vars(optimizer).get("_step_supports_amp_scaling"))
        vars(optimizer)["_step_supports_amp_scaling"] = True  # so that steps skipped for Inf are steps all the same
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._settle_warmup()
        optimizer.averaging = self  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def _join_wire(self, comm: Comm) -> None:
        self.rule.check(comm, list(self.names.values()))
        self.comm = comm
        self._traffic = Traffic(comm, Telemetry(), "averaging", self._progress)
        self._buckets: dict[Bucket, Weights] = {}
        self._trained: list[Tensor] = []
        self._kept: Memory = {}
        self._shared: Memory = {}
        self._flights: list[_Flight] = []
        self._copies: dict[Bucket, Tensor] = {}
        self._jobs: deque[Generator[Handle, Tensor, None]] = deque()
        self._awaited: Handle | None = None
        self._begun = False
        self._restored_from = 0  # so many ranks, if at all
        self._missed = False  # whether an exchange that was under way is to be made again
        self._since = 0  # local steps since the last exchange
        self._apart: set[Tensor] = set()  # parameters trained since all ranks held the same, also if frozen by now
        self._joining = self._serving = False
        self._divide_by_active = True
        self._actives, self._weight = comm.size, 1.0
        if not comm.constructs_in_turn:
            comm.drive(compare(self._describe(), comm.rank, "parameters and settings"))

    def _describe(self) -> list[str]:
        return describe(self.optimizer, self.names, {"averaging": self.rule}, __version__)

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far, over all local steps; those of a warm-up included."""
        return self._traffic.telemetry

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0.0 for algorithms that hold nothing back."""
        return 0.0

    def consensus_distance(self) -> float:
        """How far apart ranks are: the root mean square over ranks of |x_i - mean x|; collective, an allreduce.

        Not counted by `telemetry`. Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021.
        """
        self._settle()
        return math.sqrt(self.comm.drive(self._distance()))

    def _distance(self) -> Generator[Collective, Tensor, float]:
        square = torch.zeros((), dtype=torch.float64)
        for bucket in self._lay_out():
            x = self._read(bucket)
            center = yield AllReduce(x.clone(), label="weights to compare")
            square += (x - center).double().square().sum().cpu()
        return float((yield AllReduce(self.comm.to_wire(square), label="consensus distance")))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, weights are the mean over ranks, to be evaluated or saved; afterwards each rank's own. Collective.

        Not counted by `telemetry`, and no part of the algorithm; `average()` is.
        """
        self._settle()
        own = {bucket: self._read(bucket) for bucket in self._lay_out()}
        for bucket, x in own.items():
            self._write(bucket, self.comm.run(AllReduce(x.clone(), label="weights to evaluate")))
        try:
            yield
        finally:
            for bucket, x in own.items():
                self._write(bucket, x)

    def average(self) -> None:
        """Make all ranks' weights their exact mean, such as at the end of training. Collective."""
        self._settle()
        self._jobs.append(self._average())
        self._go()

    def _average(self) -> Generator[Handle, Tensor, None]:
        for bucket in self._lay_out():
            x = yield self._traffic.start(AllReduce(self._read(bucket)), f"mean of {bucket.label}")
            self._write(bucket, x)
        self._since = 0
        self._apart.clear()

    # -- the optimizer's step ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "_raw", False):
            return
        if len(self.names) < sum(len(group["params"]) for group in optimizer.param_groups):
            self._take_new_parameters()
        self._settle()
        self._lay_out()  # so that what is new starts from weights that no local step has changed
        if self.rule.prepares and self._local_step >= 0:
            for bucket, ctx in self._lay_out().items():
                self.rule.before_step(self._read(bucket), ctx)
        self._follow_scaler()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "_raw", False):
            return
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad
        self.step += 1
        self._since += 1
        if self._local_step == 0:  # a warm-up has ended
            for bucket, ctx in self._lay_out().items():
                self._start(bucket, ctx)
        if self._local_step > 0:
            self._apart.update(param for param in self.names if param.requires_grad)
            self._traffic.count_step(sum(param.numel() for param in self.names if param.requires_grad))
            if self.rule.due(self._local_step):
                self._exchange()
        self._settle_warmup()

    @property
    def _local_step(self) -> int:
        """Steps since the warm-up, in which gradients are averaged."""
        return self.step - self.rule.warmup_steps

    def _settle_warmup(self) -> None:
        """During a warm-up the optimizer averages gradients; not before, nor after."""
        optimizer = self.optimizer
        if self.rule.warmup_steps and isinstance(optimizer, _Distributed):
            optimizer._synchronizing = self._local_step < 0
            optimizer._accumulating = not optimizer._synchronizing
            if optimizer._engine is not None:
                self._traffic.telemetry = optimizer._engine.telemetry  # one account of it all

    def _take_new_parameters(self) -> None:
        for group, settings in enumerate(self.optimizer.param_groups):
            for place, param in enumerate(settings["params"]):
                if param not in self.names:
                    self.names[param] = self._given.get(param, number(group, place))
        check_trainable(self.names)

    @torch.no_grad()
    def _follow_scaler(self) -> None:
        """Do what `GradScaler.step` leaves to us, so that a step it skips on some ranks is counted on all."""
        found, scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if self._scales_itself or found is None:
            return
        for param in self.names:
            grad = param.grad
            if grad is None:
                continue
            if found.item():
                self._hidden.append((param, grad))
                param.grad = None
            elif scale is not None:
                values = grad._values() if grad.is_sparse else grad
                values.mul_(scale.double().reciprocal().float().to(values.device))
        vars(self.optimizer).update(found_inf=None, grad_scale=None)  # torch's own refuse them unless they are fused

    # -- an exchange -------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """One round of the algorithm, or its beginning if it overlaps with what comes next."""
        if self._overlaps:
            self._launch()
        self._jobs.append(self._round())
        if not self._overlaps:
            self._go()
        elif len(self._jobs) == 1:
            self._awaited = next(self._jobs[0], None)  # the vote, if there is one, or the first bucket
            if self._awaited is None:
                self._jobs.clear()

    @property
    def _overlaps(self) -> bool:
        return self.rule.overlap and not self._joining

    @torch.no_grad()
    def _launch(self) -> None:
        """Start to exchange the weights."""
        self._look()
        if not self.rule.meets and not self._finite:
            raise self._not_finite([self.comm.rank])
        for bucket, x in self._copies.items():
            ctx = self._buckets[bucket]
            ctx.step = self._local_step
            flight = _Flight(bucket.label, bucket)
            self._flights.append(flight)
            self._traffic.launch(flight, self.rule.exchange(x, ctx))
        self._copies = {}

    def _look(self) -> None:
        """Copy weights and settings as they are now, for the vote on an exchange and for the exchange itself."""
        if not self._copies:
            for bucket, ctx in self._lay_out().items():
                self._copies[bucket] = self._read(bucket)
                ctx.group = dict(ctx.group)  # a scheduler may step before others have voted
            self._finite = all(is_finite(x) for x in self._copies.values())

    @torch.no_grad()
    def _round(self) -> Generator[Handle, Tensor, None]:
        """What is left of an exchange; yields handles to wait for, is sent their results."""
        if self.rule.meets or self._joining:
            yield from self._vote()
            if not self._actives:
                self._copies = {}
                return
        if not self._flights:
            self._launch()
        yield from self._traffic.finish(self._flights, self.rule.in_turn)
        if not self._overlaps:
            self._land()

    @torch.no_grad()
    def _land(self) -> None:
        """Everything has arrived: the new weights take the place of the old ones."""
        for flight in self._flights:
            assert isinstance(flight.result, Tensor)
            self._buckets[flight.of].settle()
            self._write(flight.of, flight.result)
        self._flights = []
        self._since = 0
        if self.rule.identical(self._local_step):
            self._apart.clear()

    def _vote(self) -> Generator[Handle, Tensor, None]:
        """Tell all ranks, and hear from them, where each stands.

        Raises, on all ranks, DivergenceError if weights are not finite on any, MismatchError if they are not at the
        same step or train different parameters.
        """
        if not self._flights:
            self._look()
        trained = zlib.crc32("\n".join(name for param, name in self.names.items() if param.requires_grad).encode())
        ballot = Ballot(
            active=self._has_moved,
            finite=self._finite,
            stale=False,
            prepared=True,
            complete=True,
            final=True,
            step=self._local_step,
            trained=trained,
            launched=len(self._flights),
        )
        verdict = yield from self._traffic.through(vote(ballot, "vote"))
        if verdict.void or not verdict.alike:
            yield from self._traffic.call_off(self._flights)
            if verdict.void:
                raise self._not_finite(verdict.void)
            raise MismatchError("ranks train different parameters: set requires_grad alike on every rank")
        self._actives = verdict.active
        shared = self._actives and self._divide_by_active
        self._weigh((self.comm.size / self._actives if ballot.active else 0.0) if shared else 1.0)

    @property
    def _has_moved(self) -> bool:
        """Whether this rank has something to contribute: a local step that no exchange has seen."""
        return self._since > 0

    def _weigh(self, weight: float) -> None:
        self._weight = weight
        for ctx in self._buckets.values():
            ctx.weight = weight

    def _not_finite(self, ranks: list[int]) -> DivergenceError:
        bad = [name for param, name in self.names.items() if not bool(param.detach().isfinite().all())]
        here = f"; here it is parameter {bad[0]!r} ({len(bad)} of {len(self.names)})" if bad else ""
        return DivergenceError(
            f"rank {self.comm.rank}: after local step {self._local_step} the weights of rank(s) {ranks} hold NaN or Inf"
            f"{here}. Nothing was averaged. Lower the learning rate, clip gradients, or go back to a checkpoint."
        )

    # -- jobs: what waits for other ranks, one after another ---------------------------------------------------------

    def _settle(self) -> None:
        """Before a local step: compare with the other ranks, if it is the first one; end what is under way."""
        self._advance(wait=True)
        self._prepare()
        self._advance(wait=True)
        if self._flights:
            self._land()

    def _prepare(self) -> None:
        """What precedes the first step, and the first one after state was loaded."""
        if not self._begun:
            self._jobs.append(self._begin())

    def _go(self) -> None:
        """Do what there is to do: here and now, or in a simulated world as soon as the other ranks have come."""
        if self.comm.constructs_in_turn:
            self._advance(wait=False)
            self.comm.nudge(self._traffic.number)  # type: ignore[attr-defined]
        else:
            self._advance(wait=True)

    def _progress(self) -> None:
        """Go on as far as possible without waiting (simulated wire)."""
        if not self._jobs:
            self._prepare()
            if self._serving and not self._jobs:
                self._shadow()
        self._advance(wait=False)

    def _advance(self, wait: bool) -> None:
        try:
            while self._jobs:
                if self._awaited is not None and not wait and not self._awaited.done():
                    return
                result = None if self._awaited is None else self._traffic.wait(self._awaited)
                try:
                    self._awaited = self._jobs[0].send(result)  # type: ignore[arg-type]  # None starts a generator
                except StopIteration:
                    self._jobs.popleft()
                    self._awaited = None
        except Exception as error:
            labels = [flight.label for flight in self._flights if flight.handle is not None]
            self._abandon()
            if isinstance(error, CommError) and labels:
                raise type(error)(f"{error} On their way: {', '.join(labels[:4])}.") from error
            raise

    def _abandon(self) -> None:
        """Forget an exchange that failed: weights and memory stay as they are."""
        for ctx in self._buckets.values():
            ctx.roll_back()
        self._jobs.clear()
        self._flights, self._copies, self._awaited = [], {}, None

    @torch.no_grad()
    def _begin(self) -> Generator[Handle, Tensor, None]:
        """Compare what must be equal, and let the algorithm see the weights that it starts from."""
        yield from self._traffic.through(compare(self._describe(), self.comm.rank, "parameters and settings"))
        buckets = self._lay_out()
        if self._restored_from and self._restored_from != self.comm.size:
            yield from self._merge()
        elif not self._restored_from:
            named = {name: [param] for param, name in self.names.items()}
            yield from self._traffic.through(replicas(named, self.comm, None, "raise"))
        self._restored_from = 0
        for bucket, ctx in buckets.items():
            self._start(bucket, ctx)
        self._begun = True
        if self._missed:
            self._missed = False
            self._repeat()

    def _repeat(self) -> None:
        """Make the exchange again that was under way when state was saved."""
        self._launch()
        self._jobs.append(self._round())

    def _start(self, bucket: Bucket, ctx: Weights) -> None:
        """Let the algorithm see the weights that local steps start from, which a warm-up has yet to make."""
        if self._local_step < 0:
            return
        ctx.step = self._local_step
        self.rule.start(self._read(bucket), ctx)
        ctx.settle()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _lay_out(self) -> dict[Bucket, Weights]:
        """The buckets of all parameters that are trained; memory follows its parameters."""
        trained = [p for p in self.names if p.numel() and (p.requires_grad or p in self._apart)]
        if len(trained) == len(self._trained) and all(a is b for a, b in zip(trained, self._trained, strict=True)):
            for bucket, ctx in self._buckets.items():
                ctx.group = self.optimizer.param_groups[_group(bucket)]  # loaded state makes it another dict
            return self._buckets
        kept = self._memory()
        known = {name for by_name in kept.values() for name in by_name}
        group_of = {param: i for i, group in enumerate(self.optimizer.param_groups) for param in group["params"]}
        buckets = build_buckets(
            [(self.names[param], param) for param in trained],
            # what is new has no memory to share a bucket with that of others
            lambda name, param: (group_of[param], not known or name in known, self.rule.kind(name, param)),
            BUCKET_BYTES,
            BUCKET_BYTES,
        )
        before, self._trained, self._buckets = self._trained, trained, {}
        for bucket in buckets:
            bucket.adopt(kept)
            for by_name in kept.values():
                for segment in bucket.segments:
                    by_name.pop(segment.name, None)
            *_, kind = cast(tuple[int, bool, Hashable], bucket.kind)
            place = vars(context_of(bucket, self.comm, "average", self._shared)) | {"kind": kind}
            ctx = self._buckets[bucket] = Weights(
                **place, group=self.optimizer.param_groups[_group(bucket)], weight=self._weight
            )
            if before:
                self._start(bucket, ctx)
        self._kept = kept
        return self._buckets

    @torch.no_grad()
    def _read(self, bucket: Bucket) -> Tensor:
        """A flat copy of a bucket's weights."""
        flat = bucket.empty()
        torch._foreach_copy_([s.view(flat) for s in bucket.segments], [s.param.detach() for s in bucket.segments])
        return flat

    @torch.no_grad()
    def _write(self, bucket: Bucket, flat: Tensor) -> None:
        torch._foreach_copy_([s.param.detach() for s in bucket.segments], [s.view(flat) for s in bucket.segments])

    # -- what persists -----------------------------------------------------------------------------------------------

    def _memory(self) -> Memory:
        """A copy of all that is kept, by kind and parameter name."""
        memory: Memory = {kind: dict(by_name) for kind, by_name in self._kept.items()}
        for bucket, ctx in self._buckets.items():
            for kind, flat in {**bucket.memory, **(self.rule.saved(ctx) if self._begun else {})}.items():
                for segment in bucket.segments:
                    memory.setdefault(kind, {})[segment.name] = segment.view(flat).clone()
        return memory

    @property
    def _under_way(self) -> bool:
        """Whether an exchange has begun that has not ended."""
        return bool(self._flights)

    def _state(self) -> dict[str, Any]:
        """What `_restore` takes."""
        state = {"step": self.step, "saved_by": self.comm.size, "under_way": self._under_way, "since": self._since}
        memory = self._memory()
        if self._since or not self.rule.identical(self._local_step):
            # for another number of ranks, which go on from the mean of all weights that there were
            memory["weights"] = {name: param.detach().clone() for param, name in self.names.items()}
        apart = [name for param, name in self.names.items() if param in self._apart]
        return {**state, "order": [], "memory": memory, "shared": copied(self._shared), "apart": apart}

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        place = {"rank": self.comm.rank, "world_size": self.comm.size}
        state_dict[KEY] = {STATE_KEY: place | self._state()}

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if KEY not in state_dict:
            return None
        state = state_dict[KEY][STATE_KEY]
        here = (self.comm.rank, self.comm.size)
        if (state["rank"], state["world_size"]) != here:
            raise ConfigError(
                f"this state belongs to rank {state['rank']} of {state['world_size']} and cannot be loaded on rank "
                f"{here[0]} of {here[1]}: each rank has weights of its own. dgcopt.checkpoint.load hands it out to any "
                f"number of ranks; or delete state_dict[{KEY!r}] to do without."
            )
        self._restore(state)
        return {key: value for key, value in state_dict.items() if key != KEY}

    def _restore(self, state: dict[str, Any]) -> None:
        """Take over what `_state` gave; ranks compare, or come together, at the next step."""
        self._advance(wait=True)
        self._abandon()
        shapes = {name: param.shape for param, name in self.names.items()}
        for kind, by_name in state["memory"].items():
            for name, tensor in by_name.items():
                if tensor.shape != shapes.get(name, ()):
                    raise ConfigError(
                        f"the state holds {kind} of shape {tuple(tensor.shape)} for parameter {name!r}, which "
                        + (f"has shape {tuple(shapes[name])}" if name in shapes else "this optimizer does not have")
                    )
        self.step, self._since = state["step"], state["since"]
        self._kept, self._shared = copied(state["memory"]), copied(state["shared"])
        self._buckets, self._trained = {}, []
        self._begun, self._restored_from = False, state["saved_by"]
        if self._restored_from == self.comm.size:
            self._kept.pop("weights", None)
        self._missed = state["under_way"]
        self._apart = {param for param, name in self.names.items() if name in state["apart"]}
        self._settle_warmup()

    def rejoin(self, comm: Comm | None = None) -> None:
        """Go on over another wire, after ranks were lost or have come; from the mean of the weights that are there.

        All ranks of `comm` must call it. A warm-up's DistributedOptimizer comes along.
        """
        state, telemetry = self._state(), self._traffic.telemetry
        comm = current_comm() if comm is None else comm
        comes_along = getattr(self.optimizer, "comm", None) is self.comm
        self._join_wire(comm)
        if comes_along:
            cast(Any, self.optimizer).rejoin(comm)
        self._traffic.telemetry = telemetry
        self._restore(state)
        self._kept["weights"] = {name: param.detach().clone() for param, name in self.names.items()}
        self._restored_from = -1  # nobody's sum is to be divided

    def _merge(self) -> Generator[Handle, Tensor, None]:
        """Another number of ranks goes on: from the mean of all weights that there were, with memory to match."""
        scale = self.comm.size / self._restored_from if self._restored_from > 0 else 1.0
        for bucket in self._buckets:
            for kind, flat in sorted(bucket.memory.items()):
                if self.rule.merges(kind):
                    mean = yield self._traffic.start(AllReduce(flat * scale), f"{kind} of {bucket.label}")
                    bucket.memory[kind] = mean
            if "weights" in bucket.memory:
                self._write(bucket, bucket.memory.pop("weights"))
        self._kept.pop("weights", None)  # of frozen parameters, which are equal
        self._missed = False

    # -- uneven data -------------------------------------------------------------------------------------------------

    def join(self, divide_by_active: bool) -> None:
        """From now on ranks may run out of data: see `dgcopt.join`."""
        self._settle()
        self._joining, self._divide_by_active = True, divide_by_active

    def shadow(self) -> bool:
        """Take part in one exchange of the ranks that still have data; False once there are none."""
        self._shadow()
        self._advance(wait=True)
        return self._joining

    def serve(self) -> None:
        """This rank has no more data: whenever others exchange, take part without (simulated wire)."""
        self._serving = True
        self._progress()
        self._go()

    def _shadow(self) -> None:
        before = self.step
        while True:
            self.step += 1
            if self._local_step > 0 and self.rule.due(self._local_step):
                break
        self._jobs.append(self._shadow_round(before))

    def _shadow_round(self, before: int) -> Generator[Handle, Tensor, None]:
        yield from self._round()
        if not self._actives:  # nobody has made a step since the exchange before, at the same step of all
            self.step, self._joining, self._serving = before, False, False
            self._actives = self.comm.size
            self._weigh(1.0)


def _group(bucket: Bucket) -> int:
    """The place of the parameter group that a bucket's parameters are in."""
    return cast(tuple[int, bool, Hashable], bucket.kind)[0]


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or Inf. Waits for the device."""
    return bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())
