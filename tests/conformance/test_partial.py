"""Partial averaging does what an independent, naive implementation of its rule does, in all its variants."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt.averaging import Averaging, LocalSGD, SlowMo, Weights
from dgcopt.averaging.partial import PATCH, SPARTA
from dgcopt.checkpoint import reshare
from dgcopt.compressors import Memory, Place
from dgcopt.errors import ConfigError
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket
from tests.conformance import naive_partial as naive

CHOICES = ("random", "strided", "drift")
STEPS = 8
LRS = [0.1 * 0.8**step for step in range(STEPS)]
SHAPES = {"embed.weight": (40, 30), "layer.weight": (33, 20), "layer.bias": (33,), "head.weight": (5, 90), "scale": ()}
NAMES = list(SHAPES)
BUDGETS = {"layer.*": 0.5, "head.*": 0.0, "*.weight": 0.05}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": functools.partial(Adam, lr=0.1, eps=1.0),  # or all coordinates would move alike at first
}
VOTE = 44
"""Bytes of a vote on which all agree."""


def seeded(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(part * 1009**place for place, part in enumerate(key)))


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draws = [torch.randn(shape, generator=seeded(i), dtype=torch.float64) for i, shape in enumerate(SHAPES.values())]
    return [draw.to(dtype) for draw in draws]


@functools.cache
def targets(step: int, rank: int) -> list[Tensor]:
    """Ranks pull in different directions, and tensors by different amounts."""
    return [
        (number + 1) * torch.randn(shape, generator=seeded(number, step, rank, 7), dtype=torch.float64) + rank
        for number, shape in enumerate(SHAPES.values())
    ]


def loss_of(step: int, rank: int, params: Iterable[Tensor]) -> Tensor:
    pulls = [(x - y.to(x.dtype)).square().sum() for x, y in zip(params, targets(step, rank), strict=True)]
    return (0.3 + 0.1 * rank) * torch.stack(pulls).sum()


def losses(ranks: int):
    return [[functools.partial(loss_of, step, rank) for rank in range(ranks)] for step in range(STEPS)]


class Ranks:
    """N ranks, each with its weights and its wrapped optimizer; without a rule, with its bare one."""

    def __init__(
        self, rule: Averaging | None, make: Callable[..., Optimizer], size: int, dtype: torch.dtype = torch.float64
    ) -> None:
        self.rule = rule
        self.params = [[nn.Parameter(tensor) for tensor in start(dtype)] for _ in range(size)]
        self.optimizers = [make(mine) for mine in self.params]
        for mine, optimizer, comm in zip(self.params, self.optimizers, dgcopt.simulated_world(size), strict=True):
            if rule is not None:
                rule.attach(optimizer, zip(NAMES, mine, strict=True), comm)

    def step(self, step: int) -> list[list[Tensor]]:
        for rank, (mine, optimizer) in enumerate(zip(self.params, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(step, rank, mine).backward()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = LRS[step]
        for optimizer in self.optimizers:
            optimizer.step()
        return [naive.copies(mine) for mine in self.params]

    def train(self, steps: Iterable[int] = range(STEPS)) -> list[list[list[Tensor]]]:
        """As the naive implementation: weights of every rank after every step."""
        return [self.step(step) for step in steps]

    def anchors(self) -> list[dict[str, Tensor]]:
        """What "drift" keeps, by rank."""
        return [optimizer.state_dict()["averaging"]["dgcopt"]["memory"]["anchor"] for optimizer in self.optimizers]


def assert_identical(ours, theirs) -> None:
    for step, (here, there) in enumerate(zip(ours, theirs, strict=True), 1):
        for rank, (mine, reference) in enumerate(zip(here, there, strict=True)):
            for name, x, y in zip(NAMES, mine, reference, strict=True):
                assert torch.equal(x, y), f"{name} of rank {rank} after step {step}"


def assert_close(ours, theirs) -> None:
    for step, (here, there) in enumerate(zip(ours, theirs, strict=True), 1):
        for rank, (mine, reference) in enumerate(zip(here, there, strict=True)):
            for name, x, y in zip(NAMES, mine, reference, strict=True):
                what = f"{name} of rank {rank} after step {step}"
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, what=what: f"{what}: {text}")


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("optimizer", "budgets"), [("momentum", {}), ("Adam", BUDGETS)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_does_what_the_naive_one_does(size: int, optimizer: str, budgets: dict, every: int, choose: Any) -> None:
    settings = {"fraction": 0.3, "choose": choose, "every": every, "budgets": budgets, "seed": 5}
    ours = Ranks(SPARTA(**settings), OPTIMIZERS[optimizer], size).train()
    assert_close(ours, naive.train(start(), NAMES, losses(size), OPTIMIZERS[optimizer], LRS, settings))


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("every", [1, 3])
def test_overlap_lands_before_the_next_update(every: int, choose: Any) -> None:
    settings = {"fraction": 0.3, "choose": choose, "every": every, "budgets": BUDGETS, "seed": 0}
    ours = Ranks(SPARTA(**settings, overlap=True), OPTIMIZERS["momentum"], 3).train()
    theirs = naive.train(start(), NAMES, losses(3), OPTIMIZERS["momentum"], LRS, settings, overlap=True)
    assert_close(ours, theirs)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_all_of_the_weights_is_local_sgd(size: int, every: int, choose: Any) -> None:
    """To the bit; and alone it is the bare optimizer."""
    ours = Ranks(SPARTA(1, choose, every), OPTIMIZERS["Adam"], size).train()
    assert_identical(ours, Ranks(LocalSGD(every), OPTIMIZERS["Adam"], size).train())
    if size == 1:
        for fraction, overlap in ((0.3, False), (0.3, True)):
            rule = SPARTA(fraction, choose, every, BUDGETS, overlap=overlap)
            assert_identical(Ranks(rule, OPTIMIZERS["Adam"], 1).train(), Ranks(None, OPTIMIZERS["Adam"], 1).train())


@pytest.mark.parametrize("choose", CHOICES)
def test_between_slow_steps(choose: Any) -> None:
    """As SlowMo's base: each slow step takes the exact mean, and until the next one ranks are kept near each other."""
    slow = functools.partial(SlowMo, every=4, momentum=0.5)
    everything = Ranks(slow(base=SPARTA(1, choose, 2)), OPTIMIZERS["momentum"], 3).train()
    assert_identical(everything, Ranks(slow(base=LocalSGD(2)), OPTIMIZERS["momentum"], 3).train())
    some = Ranks(slow(base=SPARTA(0.3, choose, 2, BUDGETS)), OPTIMIZERS["momentum"], 3).train()
    for step in (3, 7):
        assert all(torch.equal(x, y) for mine in some[step] for x, y in zip(mine, some[step][0], strict=True))
    assert not torch.equal(some[5][0][0], some[5][1][0])


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_goes_on_from_a_checkpoint(overlap: bool, choose: Any) -> None:
    """To the bit, also from one that was made while an exchange was under way."""
    rule = SPARTA(0.3, choose, 2, BUDGETS, overlap=overlap)
    whole = Ranks(rule, OPTIMIZERS["Adam"], 3, torch.bfloat16)
    whole.train(range(6))
    resumed = Ranks(rule, OPTIMIZERS["Adam"], 3, torch.bfloat16)
    for rank in range(3):
        resumed.optimizers[rank].load_state_dict(copy.deepcopy(whole.optimizers[rank].state_dict()))
        with torch.no_grad():
            for x, y in zip(whole.params[rank], resumed.params[rank], strict=True):
                y.copy_(x)
    history = whole.train(range(6, STEPS))
    assert_identical(resumed.train(range(6, STEPS)), history)
    assert not torch.equal(history[-1][0][0], history[-1][1][0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_another_number_of_ranks_goes_on_from_the_anchor(size: int) -> None:
    """What is chosen next holds the same bits on all ranks, weights and anchor; the rest of the anchor is as it was."""
    old = Ranks(SPARTA(0.3, "drift"), OPTIMIZERS["momentum"], 3)
    old.train(range(5))
    states, new = (
        [optimizer.state_dict() for optimizer in old.optimizers],
        Ranks(old.rule, OPTIMIZERS["momentum"], size),
    )
    for rank, optimizer in enumerate(new.optimizers):
        optimizer.load_state_dict(reshare(states, rank, size))
    weights = new.step(5)
    before, after = old.anchors()[0], new.anchors()
    where = {name: (after[0][name] - before[name]).abs() > 1e-12 for name in NAMES}
    assert 0 < sum(int(mask.sum()) for mask in where.values()) < 3 * PATCH
    for mine, anchor in zip(weights, after, strict=True):
        for name, x in zip(NAMES, mine, strict=True):
            assert torch.equal(anchor[name], after[0][name])
            assert torch.equal(anchor[name][where[name]], x[where[name]])


@pytest.mark.parametrize("choose", CHOICES)
def test_warm_up_is_dense_training(choose: Any) -> None:
    dense = Ranks(LocalSGD(1, warmup_steps=4), OPTIMIZERS["Adam"], 3).train()
    ranks = Ranks(SPARTA(0.3, choose, warmup_steps=4), OPTIMIZERS["Adam"], 3)
    assert_identical(ranks.train(range(4)), dense[:4])
    if choose == "drift":  # measures from where local steps begin
        for anchor, mine in zip(ranks.anchors(), dense[3], strict=True):
            assert all(torch.equal(anchor[name], x) for name, x in zip(NAMES, mine, strict=True))
    first, second, _ = ranks.step(4)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("choose", "budgets"), [("random", {}), ("random", BUDGETS), ("strided", {}), ("strided", BUDGETS), ("drift", {})]
)
def test_bytes_are_those_of_the_chosen(choose: Any, budgets: dict, size: int) -> None:
    """And of the vote; of drift, 4 for each patch besides."""
    rule = SPARTA(0.3, choose, budgets=budgets)
    values = [0] * 3
    for fraction, members in naive.buckets(NAMES, vars(rule)):
        flat = naive.layout([math.prod(SHAPES[NAMES[member]]) for member in members])
        for step in range(3):
            if choose == "random":
                values[step] += math.ceil(fraction * (len(flat) - flat.count(None)))
            elif choose == "strided":
                values[step] += len(naive.strided_coordinates(flat, fraction, step)) if fraction else 0
            else:
                values[step] += 5 + 2 * PATCH  # two of five
    ranks = Ranks(rule, OPTIMIZERS["Adam"], size, torch.float32)
    telemetry = ranks.optimizers[0].averaging.telemetry
    ranks.step(0)  # where ranks compare what they start from
    for step in (1, 2):
        payload, sent = telemetry.payload_bytes, telemetry.sent_bytes
        ranks.step(step)
        assert telemetry.payload_bytes - payload == VOTE + 4 * values[step]
        exact = 2 * (VOTE + 4 * values[step]) * (size - 1) / size
        assert exact - 3 <= telemetry.sent_bytes - sent <= exact  # each bucket's is rounded down


# -- one exchange ----------------------------------------------------------------------------------------------------


class World:
    """One bucket of tensors of several sizes on N simulated ranks."""

    def __init__(self, rule: SPARTA, size: int, numels: Iterable[int], dtype: torch.dtype = torch.float32) -> None:
        named = [(f"t{i}", torch.zeros(n, dtype=dtype)) for i, n in enumerate(numels)]
        self.rule, self.dtype = rule, dtype
        self.buckets: list[Bucket] = [
            build_buckets(named, rule.kind, 2**40, 2**40, None, GradientBucket)[0] for _ in range(size)
        ]
        self.contexts = [
            Weights(Place(rank, size, "average", 0, bucket.kind, bucket.segments), Memory(bucket.segments))
            for rank, bucket in enumerate(self.buckets)
        ]
        first = self.buckets[0]
        self.real = torch.zeros(first.numel, dtype=torch.bool)
        """Where there is no gap."""
        for segment in first.segments:
            self.real[segment.start : segment.stop] = True

    def start(self, x: Tensor) -> None:
        for ctx in self.contexts:
            self.rule.start(x.clone(), ctx)

    def exchange(self, weights: list[Tensor]) -> list[Tensor]:
        """The next one, of flat weights, which stay as they are."""
        for ctx in self.contexts:
            ctx.at(ctx.step + self.rule.every)
        flats = [x.clone() for x in weights]
        results = dgcopt.simulate([self.rule.exchange(x, c) for x, c in zip(flats, self.contexts, strict=True)])
        for ctx in self.contexts:
            ctx.commit()
        return results

    def random(self) -> list[Tensor]:
        """Weights of all ranks, which differ everywhere, in the gaps too."""
        draws = [torch.randn(len(self.real), generator=seeded(ctx.rank, ctx.step, 3)) for ctx in self.contexts]
        return [draw.add_(20 * rank).to(self.dtype) for rank, draw in enumerate(draws)]

    def chosen(self) -> Tensor:
        """Where the next exchange averages."""
        ones = torch.ones(len(self.real), dtype=self.dtype)
        first, *_ = self.exchange([ones * ctx.rank for ctx in self.contexts])
        return first != 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_chosen_are_equal_and_the_others_untouched(size: int, choose: Any, dtype: torch.dtype) -> None:
    world = World(SPARTA(0.2, choose), size, (7, 700, 65, 1000), dtype)
    world.start(torch.zeros(len(world.real)))
    seen = []
    for _ in range(3):
        before = world.random()
        after = world.exchange(before)
        chosen = torch.stack([x != y for x, y in zip(before, after, strict=True)]).any(0)
        for rank in range(size):
            assert after[rank].dtype == dtype
            assert torch.equal(after[rank][chosen], after[0][chosen])
            assert torch.equal(after[rank][~chosen], before[rank][~chosen])
        mean = torch.stack(before).double().mean(0)
        torch.testing.assert_close(after[0][chosen].double(), mean[chosen], rtol=torch.finfo(dtype).eps, atol=1e-5)
        seen.append(chosen)
        if choose == "random":
            assert chosen.sum() == math.ceil(0.2 * 1772)
            assert not chosen[~world.real].any()
    assert choose == "drift" or not torch.equal(seen[0], seen[1])


def test_random_numbers_are_as_likely_to_choose_any() -> None:
    """Counts of independent draws: chi-square has the mean n, and the standard deviation sqrt(2 n)."""
    world, fraction, draws = World(SPARTA(0.3), 2, (7, 64, 65, 100)), 0.3, 1000
    counts = sum(world.chosen().double() for _ in range(draws))[world.real]
    n = len(counts)
    p = math.ceil(fraction * n) / n
    assert counts.sum() == draws * n * p
    chi_square = float(((counts - draws * p) ** 2 / (draws * p * (1 - p))).sum())
    assert abs(chi_square - n) < 4 * math.sqrt(2 * n)


def test_random_numbers_differ_by_seed_and_step_only() -> None:
    numels = (1000, 2000)
    here, same, other = (World(SPARTA(0.1, seed=seed), 2, numels) for seed in (0, 0, 1))
    first, second = here.chosen(), here.chosen()
    assert torch.equal(first, same.chosen())
    shared = 300 * 0.1  # what two independent draws have in common
    for drawn in (second, other.chosen()):
        assert 0 < int((first & drawn).sum()) < 2 * shared


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("fraction", "period"), [(0.1, 10), (1 / 49, 49), (0.3, 3), (0.6, 2), (0.0001, 448), (1, 1)])
def test_strides_come_to_each_once_in_a_period(fraction: float, period: int, every: int) -> None:
    world = World(SPARTA(fraction, "strided", every), 2, (7, 130, 150))
    assert len(world.real) == 448
    masks = [world.chosen() for _ in range(2 * period)]
    for turn in (masks[:period], masks[period:]):
        assert torch.equal(sum(mask.int() for mask in turn), torch.ones(448, dtype=torch.int32))
    assert all(torch.equal(here, there) for here, there in zip(masks[:period], masks[period:], strict=True))
    sizes = [int(mask.sum()) for mask in masks]
    assert max(sizes) - min(sizes) <= 1


class Patches:
    """Patches A, B, C and a short D of the weights of two ranks, of which "drift" averages one at a time."""

    def __init__(self) -> None:
        self.ends = {"A": PATCH, "B": 2 * PATCH, "C": 3 * PATCH, "D": 3 * PATCH + 64}
        self.world = World(SPARTA(0.25, "drift"), 2, (3 * PATCH, 64))
        self.start = torch.randint(9, (self.ends["D"],), generator=seeded(1)).float()
        self.world.start(self.start)
        self.x = [self.start.clone(), self.start.clone()]

    def turn(self, **moves: tuple[float, float]) -> str:
        """Move the last coordinate of patches, on both ranks; which patches are averaged then?"""
        for rank, x in enumerate(self.x):
            for patch, end in self.ends.items():
                x[end - 1] += moves.get(patch, (0, 0))[rank]
                x[end - 2] = self.start[end - 2] + (rank - 0.5) / 1024  # to see by: equal where averaged
        self.x = self.world.exchange(self.x)
        return "".join(patch for patch, end in self.ends.items() if self.x[0][end - 2] == self.x[1][end - 2])


def test_drift_takes_what_has_moved_most_since_its_turn() -> None:
    patches = Patches()
    assert patches.turn(A=(3, 0), B=(2, 2)) == "A"  # 9 / 2 against 4
    assert patches.turn() == "B"  # which has waited
    assert patches.turn(C=(1, -1)) == "C"  # A is where it was when it was averaged, and B
    assert patches.turn() == "A"  # all equal
    assert patches.turn(D=(0, 1), B=(0.5, 0)) == "D"
    assert patches.turn(D=(0.25, 0.25)) == "B"


def test_an_exchange_that_fails_leaves_the_anchor() -> None:
    patches = Patches()
    world = patches.world
    world.x = [x.clone().add_(1) for x in patches.x]
    dgcopt.simulate([world.rule.exchange(x, ctx) for x, ctx in zip(world.x, world.contexts, strict=True)])
    for ctx in world.contexts:
        ctx.rollback()
        assert torch.equal(ctx.memory["anchor"], patches.start)
        ctx.commit()
        assert torch.equal(ctx.memory["anchor"], patches.start)


@pytest.mark.parametrize("choose", CHOICES)
def test_a_rank_without_data_takes_what_the_others_give(choose: Any) -> None:
    world = World(SPARTA(0.2, choose), 3, (7, 700, 65, 1000))
    world.start(torch.zeros(len(world.real)))
    for ctx, weight in zip(world.contexts, (1.5, 1.5, 0.0), strict=True):
        ctx.set_weight(weight)
    before = world.random()
    before[0][10], before[2][1500] = 100, 10000  # in the first patch, and in the last, where it must not count
    after = world.exchange(before)
    chosen = after[2] != before[2]
    assert chosen.any()
    for x in after:
        torch.testing.assert_close(x[chosen], (before[0] + before[1])[chosen] / 2)
    if choose == "drift":
        assert chosen[10] and not chosen[1500]


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0}, "fraction must be above 0 and at most 1, not 0"),
        ({"fraction": 1.1}, "fraction must be above 0 and at most 1, not 1.1"),
        ({"fraction": math.nan}, "fraction must be .* not nan"),
        ({"choose": "largest"}, 'choose must be "random", "strided" or "drift", not \'largest\''),
        ({"every": 0}, "every must be a whole number of at least 1, not 0"),
        ({"seed": 0.5}, "seed must be a whole number of at least 0, not 0.5"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, not -1"),
        ({"budgets": ["*.bias"]}, "budgets must be fractions by pattern, .* not \\['\\*.bias'\\]"),
        ({"budgets": {0: 0.5}}, "budgets must be fractions by pattern"),
        ({"budgets": {"*.bias": -0.1}}, "budgets\\['\\*.bias'\\] must be a number from 0 to 1, not -0.1"),
        ({"budgets": {"*": 0.1, "*.bias": True}}, "budgets\\['\\*.bias'\\] must be a number from 0 to 1, not True"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SPARTA(**settings)


def test_a_pattern_without_a_parameter_is_refused() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    optimizer, (comm,) = SGD(params, lr=0.1), dgcopt.simulated_world(1)
    with pytest.raises(ConfigError, match=r"no parameter's name matches '\*.bias'; they are 'fc.weight'\.$"):
        SPARTA(optimizer, budgets={"*": 0.1, "*.bias": 0.5}, named_parameters=[("fc.weight", params[0])], comm=comm)
    with pytest.raises(ConfigError, match=r"they are 'group0.parameter0'\. Give named_parameters="):
        SPARTA(optimizer, budgets={"fc.*": 0.5}, comm=comm)
    SPARTA(optimizer, budgets={"fc.*": 0.5}, named_parameters=iter([("fc.weight", params[0])]), comm=comm)
    assert optimizer.averaging.rule.kind("fc.weight", params[0]) == 0.5


def test_the_first_pattern_that_matches_counts() -> None:
    rule, param = SPARTA(0.01, budgets={"head.bias": 1, "head.*": 0.0, "*.bias": 0.5}), torch.zeros(1)
    names = {"head.bias": 1, "head.weight": 0, "body.bias": 0.5, "body.weight": 0.01, "Head.weight": 0.01}
    assert {name: rule.kind(name, param) for name in names} == names
