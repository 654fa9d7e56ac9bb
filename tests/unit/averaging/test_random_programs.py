"""Random training programs on simulated ranks, compared with bare optimizers that are averaged by the rule's letter."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt import SGP, Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized, SlowMo
from dgcopt.averaging import SPARTA, Averaging, Exponential, Ring
from tests.conformance import naive_gossip

Rows = dict[str, list[Tensor]]
"""A tensor of each rank, by parameter name."""

LATE = ["late.weight"]
PER_NODE = 2
"""Ranks on a machine, where there are four of them."""


class Model(nn.Module):
    """An embedding, a layer that some ranks leave out, a layer to freeze, and one that is trained later."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 4, sparse=sparse)
        self.first, self.branch, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.late = nn.Linear(4, 4, bias=False)
        self.double()

    def forward(self, seed: int, rank: int, idle: bool) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        rows = torch.randint(5, (3, 2), generator=generator)
        x = self.first(self.table(rows).mean(1) + torch.randn(3, 4, generator=generator, dtype=torch.float64))
        for layer in (self.frozen, self.late) if idle else (self.branch, self.frozen, self.late):
            x = x + torch.tanh(layer(x))
        return (x - torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()


@dataclass(frozen=True)
class Setup:
    """Rule, optimizer and ranks of a program."""

    rule: Averaging
    size: int
    kind: Any
    group: dict[str, Any]
    sparse: bool
    scaled: bool
    """True if a GradScaler steps."""


@dataclass(frozen=True)
class Step:
    """One step of a program, and all changes before it.

    Attributes:
        idle: by rank, True to leave out a layer. passes: by rank, the backward passes. to_none: of `zero_grad`.
        nan: the ranks with NaN in their gradients, which a scaler skips.
        lr: the learning rate from now on. trains: `requires_grad` of the layer to freeze.
        adds: train the last layer from now on.
        reloads: load the state into newly wrapped optimizers. restores: save the state; the next time load it.
        averages: go on from the mean. unscales: unscale gradients before the scaler's step.
    """

    idle: tuple[bool, ...]
    passes: tuple[int, ...]
    to_none: bool
    nan: frozenset[int] = frozenset()
    lr: float | None = None
    trains: bool | None = None
    adds: bool = False
    reloads: bool = False
    restores: bool = False
    averages: bool = False
    unscales: bool = False


class Replicas:
    """A model, an optimizer and a scaler for each rank."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.models = [Model(setup.sparse) for _ in range(setup.size)]
        self.groups = [[n for n, _ in self.models[0].named_parameters() if not n.startswith(("table", "late"))]]
        self.groups.append(["table.weight"])
        self.wrap()

    def wrap(self) -> None:
        """Make the optimizers of all models."""
        self.optimizers: list[Any] = [self.make(model) for model in self.models]
        self.scalers = [torch.amp.GradScaler("cpu", 64.0, enabled=self.setup.scaled) for _ in self.models]

    def make(self, model: Model) -> Optimizer:
        groups = [
            {
                **self.setup.group,
                "params": [*map(model.get_parameter, names)],
                "lr": self.setup.group["lr"] / (1 + place),
            }
            for place, names in enumerate(self.groups[:2])
        ]
        made: Optimizer = self.setup.kind(groups)
        return made

    @property
    def names(self) -> list[str]:
        return [name for names in self.groups for name in names]

    def rows(self, names: Iterable[str]) -> Rows:
        return {name: [model.get_parameter(name).detach().clone() for model in self.models] for name in names}

    @torch.no_grad()
    def put(self, rows: Rows) -> None:
        for name, row in rows.items():
            for model, value in zip(self.models, row, strict=True):
                model.get_parameter(name).copy_(value)

    def add_group(self) -> None:
        if LATE not in self.groups:
            self.groups.append(LATE)
            for optimizer, model in zip(self.optimizers, self.models, strict=True):
                optimizer.add_param_group({"params": [model.late.weight], **self.setup.group})

    def prepare(self, step: Step) -> None:
        for model in self.models:
            # of the layer to come, too; gradients of a frozen layer must be None on all ranks or none
            model.zero_grad(step.to_none or step.reloads or step.trains is False)
            if step.trains is not None:
                model.frozen.requires_grad_(step.trains)
        if step.adds:
            self.add_group()
        if step.lr is not None:
            for optimizer in self.optimizers:
                for place, group in enumerate(optimizer.param_groups):
                    group["lr"] = step.lr / (1 + place)

    def backward(self, step: Step, seed: int) -> None:
        for rank, (model, scaler) in enumerate(zip(self.models, self.scalers, strict=True)):
            for again in range(step.passes[rank]):
                loss = model(10 * seed + again, rank, step.idle[rank])
                scaler.scale(loss * math.nan if rank in step.nan else loss).backward()
        if step.unscales:
            for optimizer, scaler in zip(self.optimizers, self.scalers, strict=True):
                scaler.unscale_(optimizer)

    def step(self) -> None:
        for optimizer, scaler in zip(self.optimizers, self.scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()


class Ours(Replicas):
    """Averaged by dgcopt."""

    def wrap(self) -> None:
        super().wrap()
        comms = dgcopt.simulated_world(self.setup.size, self.setup.size // PER_NODE if self.setup.size == 4 else 1)
        for optimizer, model, comm in zip(self.optimizers, self.models, comms, strict=True):
            self.setup.rule.attach(optimizer, model.named_parameters(), comm)
        if LATE in self.groups:  # last, as DiLoCo's fragments depend on when parameters were added
            self.groups.remove(LATE)
            self.add_group()

    def saved(self) -> Any:
        each = zip(self.models, self.optimizers, self.scalers, strict=True)
        return copy.deepcopy([tuple(part.state_dict() for part in parts) for parts in each])

    def load(self, saved: Any) -> None:
        for *parts, states in zip(self.models, self.optimizers, self.scalers, copy.deepcopy(saved), strict=True):
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)

    def reload(self) -> None:
        saved, trains = self.saved(), self.models[0].frozen.weight.requires_grad
        self.models = [Model(self.setup.sparse) for _ in self.models]
        for model in self.models:
            model.frozen.requires_grad_(trains)
        self.wrap()
        self.load(saved)


class Reference(Replicas):
    """Bare optimizers, whose weights a rule averages by hand.

    Attributes:
        steps: steps so far. arriving: weights that a round in flight brings before the next step.
        apart: parameters that some step has changed since all ranks were equal.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.steps = 0
        self.arriving: Rows = {}
        self.apart: set[str] = set()
        self.start(self.names)

    # -- what rules define -------------------------------------------------------------------------------------------

    def start(self, names: Sequence[str]) -> None:
        """See the weights of parameters before their first local step."""

    def after(self, step: int) -> None:
        """Do what follows local step number `step`, from 1."""
        raise NotImplementedError

    # -- steps -------------------------------------------------------------------------------------------------------

    def add_group(self) -> None:
        before = self.names
        super().add_group()
        self.start([name for name in self.names if name not in before])

    def exchanged(self) -> list[str]:
        return [n for n in self.names if self.models[0].get_parameter(n).requires_grad or n in self.apart]

    def land(self) -> None:
        self.put(self.arriving)
        if self.arriving and self.is_equal_after_landing:
            self.apart -= self.arriving.keys()
        self.arriving = {}

    is_equal_after_landing = True

    def step(self) -> None:
        self.land()
        local = self.steps + 1 - self.setup.rule.warmup_steps
        if local > 0:
            for name in self.names:
                params = [model.get_parameter(name) for model in self.models]
                if any(param.requires_grad or param.grad is not None for param in params):
                    self.apart.add(name)
        else:
            if any(self.is_spoiled(model) for model in self.models):
                for scaler in self.scalers:
                    scaler.update()
                return
            self.average_gradients()
        super().step()
        self.steps += 1
        if local == 0:
            self.start(self.names)
        elif local > 0:
            self.after(local)

    def is_spoiled(self, model: Model) -> bool:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        return any(bool(grad.to_dense().isnan().any()) for grad in grads)

    def average_gradients(self) -> None:
        for name in self.names:
            params = [model.get_parameter(name) for model in self.models]
            grads = [param.grad for param in params if param.grad is not None]
            total = functools.reduce(torch.add, grads) / len(params) if grads else None
            for param in params:
                param.grad = None if total is None else total.clone()

    def average(self) -> None:
        self.land()
        self.put({name: [torch.stack(row).mean(0)] * len(row) for name, row in self.rows(self.names).items()})
        self.apart = set()

    def mixed(self, matrix: Tensor) -> Rows:
        """Weights of which rank j holds the shares `matrix[j]` of all ranks'."""
        rows = self.rows(self.exchanged())
        return {n: list(torch.tensordot(matrix, torch.stack(row), 1)) for n, row in rows.items()}


def all_alike(size: int) -> Tensor:
    return torch.full((size, size), 1 / size, dtype=torch.float64)


def in_machines(matrix: Tensor, per_node: int = PER_NODE) -> Tensor:
    """The shares of ranks, of those of machines."""
    return torch.kron(matrix, all_alike(per_node))


class ByLocalSGD(Reference):
    def after(self, step: int) -> None:
        rule: Any = self.setup.rule
        matrix = None
        if step % rule.every == 0:
            matrix = all_alike(self.setup.size)
        elif getattr(rule, "node_every", None) and step % rule.node_every == 0:
            machines = self.setup.size // PER_NODE if self.setup.size == 4 else 1
            matrix = in_machines(torch.eye(machines, dtype=torch.float64), self.setup.size // machines)
        if matrix is not None:
            self.is_equal_after_landing = step % rule.every == 0 and not isinstance(rule, SPARTA)
            self.arriving = self.mixed(matrix)
        if not rule.overlap:
            self.land()


class BySlowMo(Reference):
    def start(self, names: Sequence[str]) -> None:
        if not hasattr(self, "anchor"):
            self.anchor: Rows = {}
            self.u: Rows = {}
        for name, row in self.rows(names).items():
            self.anchor[name], self.u[name] = row, [torch.zeros_like(x) for x in row]

    def after(self, step: int) -> None:
        rule: Any = self.setup.rule
        is_slow = (rule.momentum != 0 or rule.slow_lr != 1) and step % rule.every == 0
        if step % rule.base.every == 0 or (is_slow and rule.exact):
            self.put(self.mixed(all_alike(self.setup.size)))
        if is_slow:
            groups = zip(self.groups, self.optimizers[0].param_groups, strict=True)
            lr_of = {name: group["lr"] for names, group in groups for name in names}
            for name, row in self.rows(self.exchanged()).items():
                for rank, x in enumerate(row):
                    a, u, lr = self.anchor[name][rank], self.u[name][rank], lr_of[name]
                    self.u[name][rank] = u = rule.momentum * u + (a - x) / lr
                    self.anchor[name][rank] = a - rule.slow_lr * lr * u
            self.put({name: self.anchor[name] for name in self.exchanged()})
        if rule.exact if is_slow else step % rule.base.every == 0:
            self.apart -= {*self.exchanged()}


class ByDiLoCo(Reference):
    def start(self, names: Sequence[str]) -> None:
        rule: Any = self.setup.rule
        rows = self.rows(names)
        if not hasattr(self, "anchors"):
            self.anchors = {name: nn.Parameter(row[0]) for name, row in rows.items()}
            self.change: dict[str, Tensor] = {}
            self.fragments = split(list(names), [row[0].numel() for row in rows.values()], rule.fragments)
            self.outers = [rule.outer([self.anchors[name] for name in names]) for names in self.fragments]
        for name, row in rows.items():
            if name not in self.anchors:
                self.anchors[name] = nn.Parameter(row[0])
                self.outers[-1].add_param_group({"params": [self.anchors[name]]})
                self.fragments[-1].append(name)
            self.anchors[name].data.copy_(row[0])

    def after(self, step: int) -> None:
        rule: Any = self.setup.rule
        interval = rule.every // rule.fragments
        if (step + rule.delay) % interval == 0:
            names = {*self.fragments[((step + rule.delay) // interval - 1) % rule.fragments]}
            for name, row in self.rows(names & {*self.exchanged()}).items():
                self.change[name] = self.anchors[name].detach() - torch.stack(row).mean(0)
        if step % interval == 0:
            turn = (step // interval - 1) % rule.fragments
            for name in self.fragments[turn]:
                self.anchors[name].grad = self.change.pop(name, None)
            self.outers[turn].step()
            for name, row in self.rows({*self.fragments[turn]} & {*self.exchanged()}).items():
                anchor = self.anchors[name].detach()
                self.put({name: [(1 - rule.alpha) * anchor + rule.alpha * x for x in row]})
                if rule.alpha == 0:
                    self.apart.discard(name)


def split(names: list[str], numels: list[int], parts: int) -> list[list[str]]:
    """Runs of parameters: the next one begins where the middle of a parameter lies beyond its share of all elements."""
    runs: list[list[str]] = [[]]
    seen = 0
    for place, (name, numel) in enumerate(zip(names, numels, strict=True)):
        is_beyond = seen + numel / 2 > sum(numels) * len(runs) / parts
        if runs[-1] and len(runs) < parts and (is_beyond or len(names) - place == parts - len(runs)):
            runs.append([])
        runs[-1].append(name)
        seen += numel
    return runs


class ByGossip(Reference):
    """SGP and Decentralized; nothing but `average` makes ranks equal."""

    is_equal_after_landing = False

    def after(self, step: int) -> None:
        rule: Any = self.setup.rule
        if step % rule.every == 0:
            size = self.setup.size // PER_NODE if rule.hierarchical else self.setup.size
            if isinstance(rule, Decentralized):
                pairs = naive_gossip.matrix(naive_gossip.even(naive_gossip.shift_one), size, step // rule.every)
                matrix = all_alike(size) if rule.peers == "all" else pairs
            else:
                send_to = naive_gossip.ring if isinstance(rule.graph, Ring) else naive_gossip.exponential(1)
                matrix = naive_gossip.matrix(naive_gossip.even(send_to), size, step // rule.every - 1)
            self.arriving = self.mixed(in_machines(matrix) if rule.hierarchical else matrix)
        if not rule.overlap:
            self.land()


class ByRing(Reference):
    """LowPrecisionDecentralized, one range for each parameter group."""

    is_equal_after_landing = False

    def start(self, names: Sequence[str]) -> None:
        self.w = [self.flat(names) for names in self.groups]
        self.left, self.right = [w.roll(1, 0) for w in self.w], [w.roll(-1, 0) for w in self.w]

    def flat(self, names: Sequence[str]) -> Tensor:
        rows = self.rows(names)
        return torch.stack([torch.cat([rows[n][rank].flatten() for n in names]) for rank in range(self.setup.size)])

    def after(self, step: int) -> None:
        rule: Any = self.setup.rule
        if (step - 1) % rule.every == 0:
            for names, w, left, right in zip(self.groups, self.w, self.left, self.right, strict=True):
                d = self.flat(names) + left / 3 + right / 3 - 5 / 3 * w
                q = torch.stack([naive_gossip.quantised(row) for row in d])
                for mine, move in ((w, q), (left, q.roll(1, 0)), (right, q.roll(-1, 0))):
                    mine += move
                sizes = [self.models[0].get_parameter(name).numel() for name in names]
                for name, rows in zip(names, w.split(sizes, 1), strict=True):
                    self.put({name: [r.view_as(self.models[0].get_parameter(name)) for r in rows]})


class Program:
    """Replicas of dgcopt's and the reference, side by side."""

    def __init__(self, setup: Setup, reference: type[Reference]) -> None:
        self.setup = setup
        self.ours, self.theirs = Ours(setup), reference(setup)
        self.saved: tuple[Any, Any] | None = None
        self.seed = 0

    def run(self, step: Step) -> None:
        self.seed += 1
        if step.restores:
            self.restore()
        for replicas in (self.ours, self.theirs):
            replicas.prepare(step)
        if step.reloads:
            self.ours.reload()
        if step.averages:
            for optimizer in self.ours.optimizers:
                optimizer.averaging.average()
            self.theirs.average()
        for replicas in (self.ours, self.theirs):
            replicas.backward(step, self.seed)
            replicas.step()
        self.assert_close(self.ours.rows(self.ours.names), self.theirs.rows(self.theirs.names))
        assert {o.averaging.step for o in self.ours.optimizers} == {self.theirs.steps}

    def restore(self) -> None:
        for replicas in (self.ours, self.theirs):
            for model in replicas.models:
                model.zero_grad()
        if self.saved is None or len(self.saved[0][0][1]["param_groups"]) != len(self.ours.groups):
            self.saved = self.ours.saved(), copy.deepcopy(vars(self.theirs))
            return
        ours, theirs = self.saved
        self.ours.load(ours)
        trains = self.theirs.models[0].frozen.weight.requires_grad
        vars(self.theirs).update(copy.deepcopy(theirs))
        for model in self.theirs.models:
            model.frozen.requires_grad_(trains)

    def assert_close(self, ours: Rows, theirs: Rows) -> None:
        for name, row in theirs.items():
            for rank, (x, y) in enumerate(zip(ours[name], row, strict=True)):
                torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8, msg=f"{name} of rank {rank}: {{}}".format)


# -- random setups and steps -----------------------------------------------------------------------------------------

rare = st.sampled_from([False, False, False, True])
rates = st.sampled_from([0.1, 0.03])
every = st.sampled_from([1, 2, 3, 4])
warmups = st.sampled_from([0, 0, 0, 2])
flag = st.booleans()
KINDS: list[tuple[Any, list[dict[str, Any]]]] = [
    (SGD, [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01}]),
    (Adam, [{"eps": 1e-3}, {"eps": 1e-3, "weight_decay": 0.1}]),  # a smaller eps makes rounding decide over steps
]
OUTERS = [
    functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    functools.partial(SGD, lr=1.0),
    functools.partial(Adam, lr=0.05, eps=1e-3),
]
LOSSLESS = [
    None,
    dgcopt.NoCompression(),
    dgcopt.DGC(1.0, source="gradient"),
    dgcopt.TopK(1.0, values="fp64", source="gradient"),
    dgcopt.CSC(1.0, chunk=64, source="gradient"),
]


@st.composite
def local_sgd(draw: st.DrawFn, size: int) -> Averaging:
    if draw(rare):
        return SPARTA(1.0, every=draw(every), overlap=draw(flag), warmup_steps=draw(warmups))
    node_every = draw(st.sampled_from([None, 1, 2]))
    return LocalSGD(draw(every) * (node_every or 1), node_every, draw(warmups), draw(flag))


@st.composite
def slow_mo(draw: st.DrawFn, size: int) -> Averaging:
    sharded, exact = draw(st.sampled_from([(True, True), (False, True), (False, False)]))
    momentum, slow_lr, base = (
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.sampled_from([1.0, 0.7])),
        LocalSGD(draw(every)),
    )
    return SlowMo(draw(every), momentum, slow_lr, base, sharded, exact, warmup_steps=draw(warmups))


@st.composite
def diloco(draw: st.DrawFn, size: int) -> Averaging:
    fragments, interval = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    delay, alpha = draw(st.integers(0, interval - 1)), draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    outer, compression = draw(st.sampled_from(OUTERS)), draw(st.sampled_from(LOSSLESS))
    return DiLoCo(fragments * interval, outer, compression, fragments, delay, alpha, draw(warmups))


@st.composite
def gossip(draw: st.DrawFn, size: int) -> Averaging:
    hierarchical = size == 4 and draw(flag)
    if draw(flag):
        return Decentralized(draw(st.sampled_from(["all", "shift_one"])), draw(every), hierarchical, draw(warmups))
    graph = draw(st.sampled_from([Exponential(), Ring()]))
    return SGP(graph, draw(flag), draw(every), draw(warmups), hierarchical)


@st.composite
def ring(draw: st.DrawFn, size: int) -> Averaging:
    return LowPrecisionDecentralized(draw(every))


RULES: dict[str, tuple[Callable[[int], st.SearchStrategy[Averaging]], type[Reference]]] = {
    "LocalSGD": (local_sgd, ByLocalSGD),
    "SlowMo": (slow_mo, BySlowMo),
    "DiLoCo": (diloco, ByDiLoCo),
    "gossip": (gossip, ByGossip),
    "ring": (ring, ByRing),
}


@st.composite
def setups(draw: st.DrawFn, name: str) -> Setup:
    size = draw(st.sampled_from([2, 3, 4]))
    rule = draw(RULES[name][0](size))
    kind, choices = draw(st.sampled_from(KINDS))
    group = {"lr": draw(rates), **draw(st.sampled_from(choices))}
    sparse = kind is SGD and "weight_decay" not in group and draw(flag)
    return Setup(rule, size, kind, group, sparse, draw(flag))


@st.composite
def steps(draw: st.DrawFn, setup: Setup) -> Step:
    changes_layers = not isinstance(setup.rule, LowPrecisionDecentralized)  # whose range is of one layout
    warms_up = setup.rule.warmup_steps > 0  # simulated ranks then need gradients, and unscaled ones, before any steps
    passes = st.sampled_from([1, 1, 2] if setup.scaled or warms_up else [1, 1, 2, 0])
    return Step(
        draw(st.tuples(*[rare] * setup.size)),
        draw(st.tuples(*[passes] * setup.size)),
        draw(flag),
        draw(st.frozensets(st.integers(0, setup.size - 1), max_size=2)) if setup.scaled and draw(rare) else frozenset(),
        draw(rates) if draw(rare) else None,
        draw(st.sampled_from([None, None, True, False])) if changes_layers else None,
        adds=changes_layers and draw(rare),
        reloads=draw(rare),
        restores=draw(rare),
        averages=draw(rare),
        unscales=setup.scaled and (warms_up or draw(flag)),
    )


def programs(name: str) -> st.SearchStrategy[tuple[Setup, list[Step]]]:
    return setups(name).flatmap(lambda setup: st.tuples(st.just(setup), st.lists(steps(setup), min_size=3, max_size=9)))


def check(name: str, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(programs(name))
    def run(program: tuple[Setup, list[Step]]) -> None:
        setup, course = program
        running = Program(setup, RULES[name][1])
        for step in course:
            running.run(step)

    run()


@pytest.mark.parametrize("name", RULES)
def test_random_programs_equal_the_rule_by_its_letter(name: str) -> None:
    logging.getLogger("dgcopt").setLevel(logging.CRITICAL)
    check(name, 6)
