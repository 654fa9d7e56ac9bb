"""Random training programs on simulated ranks, compared with one process that steps on the mean gradient."""

from __future__ import annotations

import copy
import functools
import logging
import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import dgcopt
from dgcopt.gradients.synchronised import steps_of
from tests.support.worlds import same

Idle = frozenset[str]
"""Layers without a gradient on one rank."""


class Model(nn.Module):
    """An embedding, a channels-last convolution, a tied weight, a layer to freeze, and one that is trained later."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 3, sparse=sparse)
        self.conv = nn.Conv2d(2, 3, 2)
        self.tied, self.again, self.branch, self.frozen = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.late = nn.Linear(6, 6, bias=False)
        self.double()
        self.again.weight = self.tied.weight
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, seed: int, rank: int, idle: Idle) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        image = torch.randn(2, 2, 3, 3, generator=generator, dtype=torch.float64)
        target = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        rows = torch.randint(5, (2, 2), generator=generator)
        word = target[:, :3] if "table" in idle else self.table(rows).mean(1)
        x = torch.cat([self.conv(image.to(memory_format=torch.channels_last)).mean((2, 3)), word], 1)
        x = self.again(torch.tanh(self.tied(x)))
        for name in ("branch", "frozen"):
            if name not in idle:
                x = x + torch.tanh(getattr(self, name)(x))
        return (self.norm(x + torch.tanh(self.late(x))) - target).square().mean()


@dataclass(frozen=True)
class Setup:
    """Optimizer, compressor and settings of a program."""

    size: int
    kind: Any
    group: dict[str, Any]
    compressor: dgcopt.Compressor
    sparse: bool
    uneven: bool
    """Two ranks on one machine, one on another."""
    settings: dict[str, Any]

    def wire(self) -> list[Any]:
        return dgcopt.simulated_world(4, 2) if self.uneven else dgcopt.simulated_world(self.size)

    @property
    def takes_over(self) -> bool:
        """True if a compressor takes SGD's momentum over, so that gradients after a step are no plain means."""
        parts = {type(part) for part in self.compressor.parts()}
        return self.kind is SGD and not parts.isdisjoint({dgcopt.DGC, dgcopt.CSC})

    @property
    def rows_are_sparse(self) -> bool:
        """True if the embedding's gradient is exchanged as rows."""
        return self.sparse and not self.settings["sparse_as_dense"]


@dataclass(frozen=True)
class Step:
    """One step of a program, and all changes before it.

    Attributes:
        idle: by rank, the layers without a gradient.
        passes, announced: backward passes, and `backward_passes_per_step`. unsent: earlier passes inside `no_sync()`.
        to_none: argument of `zero_grad`; None keeps the gradients.
        nan: the rank whose last pass gives NaN.
        changes: settings of parameter groups.
        trains: `requires_grad` of the layer to freeze. freezes_after: freeze it between backward and step.
        adds: train the last layer from now on.
        reloads: load the state into newly wrapped optimizers. restores: save the state; the next time load it.
        fails: fail once on all ranks, before the last buckets are launched.
        by_hand: call `synchronize()`. clips: clip the mean gradient. again: step once more.
    """

    idle: tuple[Idle, ...]
    passes: int
    announced: int
    unsent: int
    to_none: bool | None
    nan: int | None
    changes: dict[str, float] = field(default_factory=dict)
    trains: bool | None = None
    freezes_after: bool = False
    adds: bool = False
    reloads: bool = False
    restores: bool = False
    fails: bool = False
    by_hand: bool = False
    clips: bool = False
    again: bool = False


class Program:
    """Replicas on simulated ranks, and one in this process with a bare optimizer.

    Programs of as many ranks may share a `wire`: all comms of `Setup.wire`.
    """

    def __init__(self, setup: Setup, wire: list[Any]) -> None:
        self.setup = setup
        self.wire = wire
        self.whole = Model(setup.sparse)
        self.params = dict(self.whole.named_parameters())
        first = [name for name in self.params if not name.startswith(("table", "late"))]
        table = {**setup.group, **({"weight_decay": 0.0} if setup.rows_are_sparse else {})}  # SGD decays no sparse rows
        self.groups = [(first, setup.group), (["table.weight"], table)]
        self.bare = self.make(self.whole)
        self.own: list[dict[str, Tensor]] = [{} for _ in range(setup.size)]
        """By rank, the gradients that `param.grad` should be."""
        self.added: set[str] = set()
        """Parameters that got a gradient on some rank since the last step."""
        self.void: set[str] = set()
        """Parameters with a gradient of a skipped step."""
        self.seed = 0
        self.saved: Any = None
        self.wrap()

    @property
    def names(self) -> list[str]:
        return [name for names, _ in self.groups for name in names]

    @property
    def replicas(self) -> list[tuple[Optimizer, Model]]:
        return [*zip(self.optimizers, self.models, strict=True), (self.bare, self.whole)]

    def make(self, model: Model) -> Optimizer:
        params = dict(model.named_parameters())
        groups = [{"params": [params[name] for name in names], **group} for names, group in self.groups]
        made: Optimizer = self.setup.kind(groups, lr=0.1)
        return made

    def wrap(self) -> None:
        setup = self.setup
        self.models = [Model(setup.sparse) for _ in range(setup.size)]
        more = {"process_set": range(setup.size)} if setup.uneven else {}
        self.optimizers: list[Any] = [
            dgcopt.DistributedOptimizer(
                self.make(model), model.named_parameters(), setup.compressor, comm=comm, **setup.settings, **more
            )
            for model, comm in zip(self.models, self.wire, strict=False)
        ]
        self.steps = self.skipped = 0
        self.counted = [vars(optimizer.telemetry).copy() for optimizer in self.optimizers]

    # -- between steps -----------------------------------------------------------------------------------------------

    def zero(self, to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(to_none)
        self.added, self.void = set(), set()
        for own in self.own:
            for name in own.keys() & self.names:
                own[name] = torch.zeros_like(own[name])
                if to_none:
                    del own[name]

    def train(self, is_trained: bool) -> None:
        for _, model in self.replicas:
            model.frozen.requires_grad_(is_trained)

    def change(self, changes: dict[str, float]) -> None:
        for optimizer, _ in self.replicas:
            for place, group in enumerate(optimizer.param_groups):
                group.update({key: value / (1 + place) for key, value in changes.items()})
                if place == 1 and self.setup.rows_are_sparse:
                    group["weight_decay"] = 0.0

    def add_group(self) -> None:
        if "late.weight" not in self.names:
            self.groups.append((["late.weight"], self.setup.group))
            for optimizer, model in self.replicas:
                optimizer.add_param_group({"params": [model.late.weight], **self.setup.group})

    def snapshot(self) -> list[Any]:
        return copy.deepcopy([(optimizer.state_dict(), model.state_dict()) for optimizer, model in self.replicas])

    def load(self, saved: list[Any]) -> None:
        for (optimizer, model), (state, weights) in zip(self.replicas, saved, strict=True):
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)

    def restore(self) -> None:
        self.zero(True)
        if self.saved is not None and len(self.saved[0][0]["param_groups"]) == len(self.groups):
            self.load(copy.deepcopy(self.saved))
        else:
            self.saved = self.snapshot()

    def reload(self) -> None:
        saved = self.snapshot()
        self.wrap()
        self.own, self.added, self.void = [{} for _ in self.own], set(), set()
        self.train(self.whole.frozen.weight.requires_grad)
        self.load(saved)

    # -- a step ------------------------------------------------------------------------------------------------------

    def run_backward(self, step: Step) -> None:
        """Make all changes before a step, and its backward passes."""
        if step.to_none is not None:
            self.zero(step.to_none)
        if step.adds:
            self.add_group()
        if step.restores:
            self.restore()
        if step.reloads:
            self.reload()
        if step.trains is not None:
            self.train(step.trains)
        self.change(step.changes)
        for optimizer in self.optimizers:
            optimizer.set_backward_passes_per_step(step.announced)
        with ExitStack() as blocks:
            for optimizer in self.optimizers:
                blocks.enter_context(optimizer.no_sync())
            for _ in range(step.unsent):
                self.backward(step)
        for left in reversed(range(step.passes)):
            self.backward(step, step.nan if left == 0 else None)
        if step.freezes_after:
            self.train(False)

    def run_step(self, step: Step) -> None:
        """Take the step after `run_backward`."""
        if step.fails and all(bool(is_finite(own[name])) for own in self.own for name in own.keys() & self.names):
            self.fail()
        for _ in range(1 + step.again):
            self.step(step)

    def backward(self, step: Step, nan: int | None = None) -> None:
        self.seed += 1
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        for rank, (model, own) in enumerate(zip(self.models, self.own, strict=True)):
            scale = torch.nan if rank == nan else 1.0
            (model(self.seed, rank, step.idle[rank]) * scale).backward()
            loss = self.whole(self.seed, rank, step.idle[rank]) * scale
            grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    self.added.add(name)
                    own[name] = own[name] + grad if name in own else grad

    def step(self, step: Step) -> None:
        if self.step_whole(step.clips):
            self.steps += 1
        else:
            self.skipped += 1
        self.expect_step()
        if step.clips:
            for optimizer in self.optimizers:
                optimizer.clip_grad_norm_(0.1)
        if step.by_hand:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        for optimizer in self.optimizers:
            with optimizer.skip_synchronize() if step.by_hand else nullcontext():
                optimizer.step()
        self.check()

    def fail(self) -> None:
        self.expect_step()
        with patch("dgcopt.gradients.outgoing.OutgoingBuckets.launch_rest", side_effect=MemoryError):
            for optimizer in self.optimizers:
                with pytest.raises(MemoryError):
                    optimizer.step()

    def expect_step(self) -> None:
        """Give ranks without gradients their turn."""
        for optimizer in self.optimizers:
            engine = steps_of(optimizer).engine
            assert engine is not None
            engine.expect_step()

    def step_whole(self, clips: bool) -> bool:
        """Step the bare optimizer on the combined gradients; return False if the step is skipped."""
        frozen = {name for name in self.names if not self.params[name].requires_grad and name not in self.added}
        exchanged = [name for name in self.names if name not in frozen]
        self.added = set()
        grads = {name: [own[name] for own in self.own if name in own] for name in exchanged}
        if not all(bool(is_finite(grad)) for each in grads.values() for grad in each):
            self.void |= {name for own in self.own for name in own}
            return False
        self.void &= frozen
        for name in self.names:
            kept = None if name in self.void else self.own[0].get(name)  # equal on all ranks since the last step
            self.params[name].grad = self.combined(grads[name]) if name in grads else kept
        if clips:
            nn.utils.clip_grad_norm_([self.params[name] for name in self.names], 0.1)
        self.bare.step()
        for own in self.own:
            for name in self.names:
                grad = self.params[name].grad
                if name not in self.void:
                    own.pop(name, None)
                    own.update({} if grad is None else {name: grad.clone()})
        return True

    def combined(self, grads: list[Tensor]) -> Tensor | None:
        if not grads:
            return None
        if not self.setup.rows_are_sparse:
            grads = [grad.to_dense() for grad in grads]
        total = functools.reduce(torch.add, grads)
        total = total if self.setup.settings["op"] == "sum" else total / self.setup.size
        return total.coalesce() if total.is_sparse else total

    def check(self) -> None:
        """Replicas are bit-identical and equal the bare optimizer's; nothing is left unsent; telemetry adds up."""
        first, *others = [dict(model.named_parameters()) for model in self.models]
        for name, param in self.params.items():
            torch.testing.assert_close(first[name], param, rtol=1e-7, atol=1e-8, msg=f"{name}: {{}}".format)
            for rank, other in enumerate(others, 1):
                assert same(other[name], first[name]), f"{name} of rank {rank} differs from rank 0's"
        for rank, optimizer in enumerate(self.optimizers):
            told, before = vars(optimizer.telemetry).copy(), self.counted[rank]
            assert all(told[name] >= before[name] >= 0 for name in told), (before, told)
            assert (told["steps"], told["skipped"]) == (self.steps, self.skipped)
            assert told["left_out"] == 0 and told["dense_bytes"] == self.optimizers[0].telemetry.dense_bytes
            assert optimizer.residual_norm() < 1e-8
            self.counted[rank] = told


def is_finite(grad: Tensor) -> Tensor:
    return (grad.coalesce().values() if grad.is_sparse else grad).isfinite().all()


# -- random setups and steps -----------------------------------------------------------------------------------------

LOSSLESS = [
    dgcopt.NoCompression(),
    dgcopt.DGC(1.0, source="gradient"),
    dgcopt.DGC(1.0, source="gradient", overlap=True),
    dgcopt.DGC(1.0, source="gradient", vectors="sparse"),
    dgcopt.TopK(1.0, values="fp64", source="gradient"),
    dgcopt.CSC(1.0, chunk=64, source="gradient"),
    dgcopt.TopK(1.0, values="fp64", source="gradient", reduce="owner", keep=math.inf),
]
PATTERNS = ("*.bias", "[tc]*", "*")

one = st.sampled_from(LOSSLESS)
by_name = st.tuples(one, one, one).map(lambda rules: dgcopt.PerParameter(dict(zip(PATTERNS, rules, strict=True))))
rates, decays, momenta = st.sampled_from([0.05, 0.01]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.9, 0.5])
rare = st.sampled_from([False, False, False, True])
idle_layers = st.frozensets(st.sampled_from(["table", "branch", "frozen"]))
MORE: list[tuple[Any, list[dict[str, Any]]]] = [
    (SGD, [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}]),
    (SGD, [{"maximize": True}, {"momentum": 0.9, "maximize": True}]),
    (Adam, [{}, {"amsgrad": True}]),
    (AdamW, [{}, {"maximize": True}]),
    (RMSprop, [{}, {"momentum": 0.9}, {"centered": True}]),
]


@st.composite
def setups(draw: st.DrawFn, like: Setup | None = None) -> Setup:
    """Draw a setup; one for the same wire if it is to be `like` another."""
    kind, choices = draw(st.sampled_from(MORE))
    group = {"lr": draw(rates), "weight_decay": draw(decays), **draw(st.sampled_from(choices))}
    if kind is not SGD:
        group["eps"] = 1e-3  # with a smaller one, rounding decides over steps on gradients near zero
    uneven = draw(st.booleans()) if like is None else like.uneven
    compressor = draw(st.one_of(one, by_name, one.map(dgcopt.Hierarchical)) if uneven else st.one_of(one, by_name))
    op, factor = draw(st.sampled_from([("average", 1.0), ("average", 2.0), ("sum", 1.0)]))
    size = 3 if uneven else draw(st.sampled_from([2, 3])) if like is None else like.size
    exchange = {
        "op": op,
        "gradient_predivide_factor": factor,
        "sparse_as_dense": kind is not SGD or draw(st.booleans()),  # others take no sparse gradients
        "bucket_mb": draw(st.sampled_from([None, 0.0004])),
        "check_replicas_every": draw(st.sampled_from([0, 1])),
        "groups": draw(st.sampled_from([None, 2])),
    }
    return Setup(size, kind, group, compressor, draw(st.booleans()), uneven, exchange)


@st.composite
def steps(draw: st.DrawFn, setup: Setup) -> Step:
    keeps = not setup.takes_over
    to_none = draw(st.sampled_from([True, False, None] if keeps else [True, False]))
    trains = draw(st.sampled_from([None, None, True, False]))
    announced = draw(st.sampled_from([1, 1, 2]))
    settings_of = {"lr": rates, "weight_decay": decays, **({"momentum": momenta} if "momentum" in setup.group else {})}
    idle = draw(st.tuples(*[idle_layers] * setup.size)) if draw(rare) else (frozenset[str](),) * setup.size
    is_alike = len({"frozen" in layers for layers in idle}) == 1
    return Step(
        idle,
        draw(st.sampled_from([1, 1, 0, 2] if announced == 1 else [2, 1, 0])),
        announced,
        draw(st.sampled_from([0, 0, 1])),
        True if trains is False and not keeps else to_none,
        draw(st.sampled_from([*[None] * 6, *range(setup.size)])),
        {key: draw(values) for key, values in settings_of.items() if draw(rare)},
        trains,
        freezes_after=draw(rare) and keeps and is_alike,
        adds=draw(rare),
        reloads=draw(rare) and not (setup.takes_over and setup.rows_are_sparse),
        restores=draw(rare),
        fails=draw(rare),
        by_hand=draw(rare),
        clips=draw(rare) and keeps and not setup.sparse,  # torch clips no sparse gradients
        again=draw(rare) and keeps,
    )


programs = setups().flatmap(lambda setup: st.tuples(st.just(setup), st.lists(steps(setup), min_size=2, max_size=6)))

Turn = tuple[tuple[int, Step], ...]
"""The programs of a wire that run backward now and then step, in this order; those that step first come last."""


@st.composite
def turns(draw: st.DrawFn, setups_of: tuple[Setup, Setup]) -> Turn:
    places = draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
    return tuple((place, draw(steps(setups_of[place]))) for place in places)


pairs = setups().flatmap(lambda one: st.tuples(st.just(one), setups(one)))
shared = pairs.flatmap(lambda pair: st.tuples(st.just(pair), st.lists(turns(pair), min_size=3, max_size=8)))

check = functools.partial(settings, derandomize=True, database=None, suppress_health_check=[*HealthCheck])


@check(max_examples=25)
@given(programs)
def check_program(program: tuple[Setup, list[Step]]) -> None:
    setup, course = program
    running = Program(setup, setup.wire())
    for step in course:
        running.run_backward(step)
        running.run_step(step)


@check(max_examples=10)
@given(shared)
def check_shared_wire(pair: tuple[tuple[Setup, Setup], list[Turn]]) -> None:
    both, course = pair
    wire = both[0].wire()
    running = [Program(setup, wire) for setup in both]
    for turn in course:
        for place, step in turn:
            running[place].run_backward(step)
        for place, step in reversed(turn):
            running[place].run_step(step)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("dgcopt").setLevel(logging.CRITICAL)
    # searches all objects of the process in the first step without gradients
    monkeypatch.setattr("dgcopt.gradients.gradient_step.is_sharded_elsewhere", lambda names: False)
    # otherwise some coordinates may find no room in a message to their owner, and stay
    monkeypatch.setattr("dgcopt.compressors.reduction._SIGMAS", 99)


def test_random_programs_equal_their_own_in_one_process() -> None:
    check_program()


def test_random_programs_that_share_a_wire_equal_their_own_in_one_process() -> None:
    check_shared_wire()
