"""A run goes on from a checkpoint with another compressor: what the first one held back is sent by the second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt.checkpoint import reshare
from dgcopt.comm.simulated import _comms
from dgcopt.compressors import Compressor, Threshold

Given = dict[str, Tensor]
"""Sums of all gradients, by parameter name."""

SHAPES = {"a.weight": (40, 33), "a.bias": (130,), "b.weight": (9, 65), "b.bias": (5,)}

BEFORE: dict[str, Compressor] = {
    "TopK": dgcopt.TopK(0.05),
    "TopK, owner": dgcopt.TopK(0.05, reduce="owner"),
    "TopK, partition": dgcopt.TopK(0.05, reduce="partition"),
    "ChunkedTopK": dgcopt.ChunkedTopK(0.05, 64, decay=1.0),
    "DGC": dgcopt.DGC(0.05),
    "DGC, owner, int8 vectors": dgcopt.DGC(0.05, reduce="owner", vectors="int8"),
    "DGC, sparse vectors, bf16": dgcopt.DGC(0.05, vectors="sparse", residual="bf16"),
    "RandomK": dgcopt.RandomK(0.05),
    "Threshold": Threshold(1.5),
    "CLTK": dgcopt.CLTK(0.05),
    "CSC": dgcopt.CSC(0.1, 64),
    "PowerSGD": dgcopt.PowerSGD(start_step=0),
    "EFSignSGD": dgcopt.EFSignSGD(),
    "ByteGrad": dgcopt.ByteGrad(error_feedback=True),
    "OneBitReduce": dgcopt.OneBitReduce(),
    "PerParameter": dgcopt.PerParameter({"a.*": dgcopt.OneBitReduce(), "*": dgcopt.TopK(0.05, reduce="owner")}),
}
AFTER: dict[str, Compressor] = BEFORE | {
    "NoCompression": dgcopt.NoCompression(),
    "FP16": dgcopt.FP16(),
    "TopK, no feedback": dgcopt.TopK(1.0, error_feedback=False),
    "RandomK, no feedback": dgcopt.RandomK(1.0, error_feedback=False),
    "DGC at ratio 1": dgcopt.DGC(1.0),
    "PowerSGD, warm-up": dgcopt.PowerSGD(start_step=100),
    "PowerSGD, end of warm-up": dgcopt.PowerSGD(start_step=4),
    "SignSGD": dgcopt.SignSGD(),
    "biases dense": dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.TopK(0.05)}),
    "one layer dense": dgcopt.PerParameter({"a.*": dgcopt.NoCompression(), "*": dgcopt.DGC(0.05, vectors="int8")}),
}
LOSSY = {"SignSGD"}
TOLERANCE = {"DGC, sparse vectors, bf16": 0.5, "FP16": 0.5}
"""What is rounded on the way, or in memory; else only what travels in float32 is."""


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


class Ranks:
    """Simulated ranks, 0 at first, whose weights are minus the sum of all that was applied."""

    def __init__(
        self,
        compressor: Compressor,
        states: list[Any] | None = None,
        size: int = 2,
        op: str = "sum",
        machines: Sequence[int] | None = None,
        make: Callable[[Any], Optimizer] = lambda params: SGD(params, lr=1.0),
    ) -> None:
        self.params, self.optimizers = [], []
        for rank, comm in enumerate(_comms(machines or [0] * size)):
            params = {n: torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in SHAPES.items()}
            optimizer: Any = dgcopt.DistributedOptimizer(
                make(params.values()), params.items(), copy.deepcopy(compressor), comm=comm, op=op, bucket_mb=0.008
            )
            if states is not None:
                mine = copy.deepcopy(states[rank]) if len(states) == size else reshare(states, rank, size)
                optimizer.load_state_dict(mine["optimizer"])
                for name, param in params.items():
                    param.data.copy_(mine["model"][name])
            self.params.append(params)
            self.optimizers.append(optimizer)

    def states(self) -> list[Any]:
        pairs = zip(self.params, self.optimizers, strict=True)
        return [{"model": {n: p.detach() for n, p in ps.items()}, "optimizer": o.state_dict()} for ps, o in pairs]

    def step(self, given: Given, seed: int | None, void: bool = False, unused: str = "") -> None:
        """One step; of zeros where there is no seed."""
        generator = torch.Generator().manual_seed(seed or 0)
        for rank, params in enumerate(self.params):
            for name, param in params.items():
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) ** 3 * (seed is not None)
                param.grad = None
                if name != unused:
                    (param * (grad * torch.nan if void and rank == 0 else grad)).sum().backward()
                    given[name] += 0 if void else grad
        for optimizer in self.optimizers:
            optimizer.step()

    def held(self) -> dict[tuple[str, str], Tensor]:
        """Sums over ranks of what is unsent, by kind and name, where it is not zero."""
        sums: dict[tuple[str, str], Tensor] = {}
        for optimizer in self.optimizers:
            for kind, by_name in optimizer.state_dict()["dgcopt"]["memory"].items():
                for name, tensor in by_name.items() if kind.startswith("residual") else ():
                    if tensor.any():
                        sums[kind, name] = sums.get((kind, name), 0) + tensor.double()
        return sums

    def assert_nothing_is_lost(self, given: Given, tolerance: float, scale: float = 1.0, weight: float = 1.0) -> None:
        for name, param in self.params[0].items():
            left = sum((held for (_, of), held in self.held().items() if of == name), torch.zeros_like(param))
            ours = weight * left - scale * param.detach()
            torch.testing.assert_close(
                ours, given[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


def nothing() -> Given:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("then", AFTER)
@settings(deadline=None, max_examples=6)
@given(
    first=st.sampled_from(list(BEFORE)),
    size=st.integers(2, 3),
    op=st.sampled_from(["sum", "average"]),
    events=st.lists(st.sampled_from(["void", "new buckets", *SHAPES]), max_size=3),
)
def test_residuals_of_the_first_compressor_are_sent_by_the_second(
    then: str, first: str, size: int, op: str, events: list[str]
) -> None:
    """Also where steps are void, where a parameter has no gradient, and, in sums, where there is another rank."""
    given, after = nothing(), size if op == "average" else 2
    ranks = Ranks(BEFORE[first], None, size, op)
    for seed in range(3):
        ranks.step(given, seed)
    ranks = Ranks(AFTER[then], ranks.states(), after, op)
    tolerance = max(TOLERANCE.get(first, 1e-4), TOLERANCE.get(then, 1e-4))
    for seed, event in enumerate(["step", *events, "step", "step", "step"], 10):
        before = ranks.held()
        if event == "new buckets":
            for optimizer in ranks.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        else:
            ranks.step(given, seed, void=event == "void", unused=event)
        if event in ("new buckets", "void"):
            assert all(torch.equal(held, before[where]) for where, held in ranks.held().items())
        if then not in LOSSY:
            ranks.assert_nothing_is_lost(given, tolerance, scale=after if op == "average" else 1)
    assert ranks.held().keys() <= kept_by(then), f"{then} leaves what it does not send"


@functools.cache
def kept_by(name: str) -> set[tuple[str, str]]:
    """The unsent memory that a compressor has by itself."""
    ranks = Ranks(AFTER[name])
    for seed in range(6):
        ranks.step(nothing(), seed)
    return set(ranks.held())


@pytest.mark.parametrize("inner", [None, dgcopt.TopK(1.0, error_feedback=False), dgcopt.CSC(0.5, 64)], ids=str)
def test_residuals_of_machines_keep_their_weight(inner: Any) -> None:
    """A residual between machines is of their mean, to which a rank's gradient adds its part only."""
    given = nothing()
    ranks = Ranks(dgcopt.Hierarchical(dgcopt.TopK(0.05)), None, 4, "average", [0, 0, 1, 1])
    for seed in range(3):
        ranks.step(given, seed)
    ranks = Ranks(dgcopt.Hierarchical(inner), ranks.states(), 4, "average", [0, 0, 1, 1])
    for unused in ("", "a.bias", "", ""):
        ranks.step(given, 3, unused=unused)
        ranks.assert_nothing_is_lost(given, 1e-4, scale=4, weight=2)
    assert bool(ranks.held()) == isinstance(inner, dgcopt.CSC)


BETWEEN_MACHINES = ("TopK, owner", "DGC", "CSC", "PowerSGD", "EFSignSGD", "PerParameter")


@pytest.mark.parametrize("name", BETWEEN_MACHINES)
@pytest.mark.parametrize(
    ("first", "then", "op"),
    [
        ([0, 0, 1, 1], [0, 0, 0, 0], "average"),
        ([0, 0, 1, 1], [0, 1, 2, 3], "sum"),
        ([0, 1, 0, 1], [0, 0, 1, 1], "average"),
        ([0, 0, 0, 1], [0, 1, 1, 1], "average"),
        ([0, 0, 0, 1], [0, 1, 2, 2], "sum"),
    ],
    ids=str,
)
def test_residuals_of_machines_keep_their_weight_on_other_machines(
    first: list[int], then: list[int], op: str, name: str
) -> None:
    """The same ranks on other machines, and back: a machine's mean stands for as many gradients as it has ranks."""
    given, states, scale = nothing(), None, 4 if op == "average" else 1
    for seed, machines in enumerate((first, then, first)):
        ranks = Ranks(dgcopt.Hierarchical(BEFORE[name]), states, 4, op, machines)
        for event in ("", "void", "a.bias"):
            ranks.step(given, 10 * seed, void=event == "void", unused=event)
            if event != "void":
                ranks.assert_nothing_is_lost(given, 1e-4, scale, weight=4 / len(set(machines)))
        states = ranks.states()


@pytest.mark.parametrize("after", [[0, 0], [0, 1], [0, 0, 0, 1, 1, 2]], ids=str)
def test_residuals_of_machines_are_complete_among_other_ranks_on_other_machines(after: list[int]) -> None:
    given = nothing()
    ranks = Ranks(dgcopt.Hierarchical(dgcopt.TopK(0.05)), None, 4, "sum", [0, 0, 1, 1])
    ranks.step(given, 1)
    ranks = Ranks(dgcopt.Hierarchical(dgcopt.TopK(0.05)), ranks.states(), len(after), "sum", after)
    ranks.step(given, 2)
    ranks.assert_nothing_is_lost(given, 1e-4, weight=len(after) / len(set(after)))


@pytest.mark.parametrize("after", [[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3], [0, 0], [0, 0, 0, 1, 1, 2]], ids=str)
def test_machines_momentum_goes_on_on_other_machines(after: list[int]) -> None:
    """At ratio 1 as without machines; it stayed behind on ranks that are no longer the first ones of theirs."""
    ended = []
    for compressor in (dgcopt.Hierarchical(dgcopt.DGC(1.0)), dgcopt.DGC(1.0)):
        states = None
        for seed, machines in enumerate(([0, 0, 1, 1], after, [0, 0, 1, 1])):
            ranks = Ranks(compressor, states, len(machines), "average", machines, momentum)
            for step in range(2):
                ranks.step(nothing(), 10 * seed + step)
            states = ranks.states()
        ended.append([param.detach() for param in ranks.params[0].values()])
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-6)


def test_momentum_is_not_applied_twice_to_what_dgc_held_back() -> None:
    """What v has of vectors is applied as it is where they travel dense from now on, after the momentum."""
    ranks = Ranks(dgcopt.DGC(0.05, vectors="sparse"), make=momentum)
    for seed in range(3):
        ranks.step(nothing(), seed)
    states = ranks.states()
    for state in states:
        for u in state["optimizer"]["dgcopt"]["memory"]["momentum"].values():
            u.zero_()
    ranks = Ranks(dgcopt.DGC(0.05, vectors="dense"), states, make=momentum)
    before, held = {n: p.detach().clone() for n, p in ranks.params[0].items()}, ranks.held()
    for _ in range(3):
        ranks.step(nothing(), None)
        for name in ("a.bias", "b.bias"):
            torch.testing.assert_close(ranks.params[0][name], before[name] - 0.1 * held["residual", name])
    assert {name for _, name in ranks.held()} == {"a.weight", "b.weight"}


@pytest.mark.parametrize(
    "before, after, make, made_of, sent_as",
    [
        (dgcopt.TopK(0.05, source="update"), dgcopt.NoCompression(), None, "updates", "gradients"),
        (dgcopt.TopK(0.05, source="gradient"), dgcopt.DGC(0.05), Adam, "gradients", "updates"),
        (dgcopt.DGC(0.05), dgcopt.TopK(0.05), momentum, "gradients with momentum", "gradients"),
        (dgcopt.CLTK(0.05, source="gradient"), dgcopt.OneBitAdam(1), Adam, "gradients", "Adam's momentum"),
        (dgcopt.OneBitAdam(1), dgcopt.FP16(), Adam, "Adam's momentum", "gradients"),
        (dgcopt.Hierarchical(dgcopt.TopK(0.05)), dgcopt.TopK(0.05), None, "machines' gradients", "gradients"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else "",
)
def test_residuals_of_another_unit_are_released_with_a_warning(
    before: Compressor, after: Compressor, make: Any, made_of: str, sent_as: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = make or (lambda params: SGD(params, lr=1.0))
    ranks = Ranks(before, op="average", machines=[0, 1], make=make)
    for seed in range(3):
        ranks.step(nothing(), seed)
    for compressor, says in ((before, False), (after, True)):
        caplog.clear()
        again = Ranks(compressor, ranks.states(), op="average", machines=[0, 1], make=make)
        fresh = Ranks(compressor, [plain(state) for state in ranks.states()], op="average", machines=[0, 1], make=make)
        for seed in range(3, 6):
            again.step(nothing(), seed)
            fresh.step(nothing(), seed)
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        expected = f"({made_of}) cannot be sent as {sent_as} and is dropped"
        of_momentum = [text for text in told if "is dropped and starts at zero" in text]
        assert len(of_momentum) == 2 * (says and made_of == "gradients with momentum")
        assert [expected in text for text in told if text not in of_momentum] == [True] * 2 * says
        assert all("and 1 more" in text or text.count("'a.") + text.count("'b.") <= 3 for text in told)
        same = [torch.equal(ours, fresh.params[0][name]) for name, ours in again.params[0].items()]
        assert all(same) if says else not all(same), "what was dropped was sent, or nothing was held back"


def plain(state: Any) -> Any:
    """The state without the residual."""
    state = copy.deepcopy(state)
    state["optimizer"]["dgcopt"]["memory"] = {}
    return state


def test_frozen_adam_keeps_what_waits_while_a_new_parameter_warms_up() -> None:
    """It is of momentum, and waits for momentum to travel again."""
    ranks = Ranks(dgcopt.OneBitAdam(2), op="average", make=Adam)
    for seed in range(4):
        ranks.step(nothing(), seed)
    before = ranks.held()
    states = ranks.states()
    for state in states:
        for entry in state["optimizer"]["state"].values():
            entry["step"].zero_()
    ranks = Ranks(dgcopt.OneBitAdam(2), states, op="average", make=Adam)
    for _ in range(2):
        ranks.step(nothing(), 4)
        assert before.keys() == ranks.held().keys()
        assert all(torch.equal(held, before[where]) for where, held in ranks.held().items())
    ranks.step(nothing(), 5)
    assert not any(torch.equal(held, before[where]) for where, held in ranks.held().items() if where[0] == "residual")
