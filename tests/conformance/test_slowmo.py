"""SlowMo does what an independent, naive implementation of its rule does, with its buffers sharded or not."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt import LocalSGD
from dgcopt.averaging.base import Averaging
from dgcopt.averaging.diloco import DiLoCo
from dgcopt.averaging.slowmo import SlowMo
from dgcopt.averaging.weights import ParameterGroup, Weights
from dgcopt.checkpoint import reshare
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.compressors import Memory, Place
from dgcopt.errors import CommError, ConfigError
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from tests.conformance import naive_slowmo as naive
from tests.conformance.naive_slowmo import Groups

SHAPES = (((5, 7), (67,)), ((125,),))  # of parameters, by group; each of 3 ranks has a part of both
STEPS = 9
LRS = [(0.1 * 0.8**step, 0.05 * 0.9**step) for step in range(STEPS)]
INNER: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": functools.partial(SGD, lr=0.1, momentum=0.9),
    "Adam": functools.partial(Adam, lr=0.1),
}
PLAIN = functools.partial(SGD, lr=0.1)
MODES: dict[str, dict[str, bool]] = {
    "sharded": {},
    "whole": {"sharded": False},
    "own": {"sharded": False, "exact": False},
    "sharded, late": {"faithful": True},
    "own, late": {"sharded": False, "exact": False, "faithful": True},
}
EXACT = [mode for mode in MODES if not mode.startswith("own")]


@functools.cache
def noise(shape: tuple[int, ...], *key: int) -> Tensor:
    seed = sum(part * 101**place for place, part in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(dtype: torch.dtype = torch.float64) -> Groups:
    return [
        [noise(shape, 0, number, place).to(dtype, copy=True) for place, shape in enumerate(group)]
        for number, group in enumerate(SHAPES)
    ]


def gradient(step: int, rank: int, groups: Groups) -> Groups:
    """Of wavy losses, with noise that differs from rank to rank."""
    return [
        [(2 * x.detach()).sin() + noise(x.shape, step, rank, n, place).to(x.dtype) for place, x in enumerate(group)]
        for n, group in enumerate(groups)
    ]


def as_groups(groups: Groups) -> list[dict[str, Any]]:
    return [{"params": group} for group in groups]


def flat(groups: Groups) -> Tensor:
    return torch.cat([tensor.detach().flatten() for group in groups for tensor in group])


class Ranks:
    """N ranks, each with its weights and its wrapped optimizer."""

    def __init__(
        self, rule: Averaging, size: int, make: Callable[[Any], Optimizer] = INNER["SGD"], dtype=torch.float64
    ) -> None:
        self.groups = [[[nn.Parameter(x) for x in group] for group in start(dtype)] for _ in range(size)]
        self.optimizers: list[Any] = [
            rule.attach(make(as_groups(mine)), comm=comm)
            for mine, comm in zip(self.groups, dgcopt.simulated_world(size), strict=True)
        ]
        self.made = 0

    def step(self, rates: Sequence[float]) -> list[Groups]:
        self.made += 1
        for rank, (mine, optimizer) in enumerate(zip(self.groups, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for params, grads in zip(mine, gradient(self.made, rank, mine), strict=True):
                for param, grad in zip(params, grads, strict=True):
                    if param.requires_grad:
                        param.backward(grad)
        for optimizer in self.optimizers:
            for group, lr in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = lr
        for optimizer in self.optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 3  # a scheduler's step comes before the other ranks' turn
        return [naive.copies(mine) for mine in self.groups]

    def train(self, lrs: Sequence[Sequence[float]] = LRS) -> list[list[Groups]]:
        """As the naive implementation: weights of every rank after every step."""
        return [self.step(rates) for rates in lrs]

    def states(self) -> list[dict[str, Any]]:
        """Weights and optimizer of every rank, as if written and read again."""
        file = io.BytesIO()
        pairs = zip(self.groups, self.optimizers, strict=True)
        torch.save([{"weights": naive.copies(mine), "optimizer": opt.state_dict()} for mine, opt in pairs], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    @torch.no_grad()
    def load(self, states: list[dict[str, Any]]) -> None:
        for mine, optimizer, state in zip(self.groups, self.optimizers, states, strict=True):
            for params, tensors in zip(mine, state["weights"], strict=True):
                for param, tensor in zip(params, tensors, strict=True):
                    param.copy_(tensor)
            optimizer.load_state_dict(state["optimizer"])
        self.made = self.optimizers[0].averaging.step


def maker(make: Callable[[Any], Optimizer]) -> Callable[[Groups], Optimizer]:
    return lambda groups: make(as_groups(groups))


def memory_of(states: list[dict[str, Any]], kind: str) -> list[Groups]:
    """What each rank has of it."""
    by_rank = [state["optimizer"]["averaging"]["dgcopt"]["memory"][kind] for state in states]
    return [
        [[held[f"group{n}.parameter{place}"] for place in range(len(group))] for n, group in enumerate(SHAPES)]
        for held in by_rank
    ]


def total(groups: list[Groups]) -> Groups:
    return [[sum(parts) for parts in zip(*group, strict=True)] for group in zip(*groups, strict=True)]


def assert_close(ours: list[list[Groups]], theirs: list[list[Groups]], what: object = "") -> None:
    for step, (here, there) in enumerate(zip(ours, theirs, strict=True), 1):
        for rank, (mine, reference) in enumerate(zip(here, there, strict=True)):
            place = f"rank {rank} after step {step} {what}"
            message = functools.partial("{}: {}".format, place)
            torch.testing.assert_close(flat(mine), flat(reference), rtol=1e-12, atol=1e-12, msg=message)


def assert_same(ours: list[list[Groups]], theirs: list[list[Groups]], what: object = "") -> None:
    for step, (here, there) in enumerate(zip(ours, theirs, strict=True), 1):
        for rank, (mine, reference) in enumerate(zip(here, there, strict=True)):
            assert torch.equal(flat(mine), flat(reference)), f"rank {rank} after step {step} {what}"


def assert_identical(replicas: list[Groups], what: object = "") -> None:
    for rank, replica in enumerate(replicas):
        assert torch.equal(flat(replica), flat(replicas[0])), f"rank {rank} differs {what}"


SETTINGS = list(itertools.product([1, 2, 4], [1, 2, 3], [0.5, 0.7, 0.0], [1.0, 0.8], INNER))
CASES = list(itertools.product([1, 2, 3, 4, 8], MODES))


@pytest.mark.parametrize(("size", "mode"), CASES)
def test_it_is_the_rule_in_every_setting(size: int, mode: str) -> None:
    late, exact = "late" in mode, mode in EXACT
    # each case has every 19th setting, from another one on, and all cases together have each at least once
    for every, base, momentum, slow_lr, inner in SETTINGS[CASES.index((size, mode)) % 19 :: 19]:
        what = f"with every {every}, {base}, momentum {momentum}, slow_lr {slow_lr}, {inner}"
        ours = Ranks(SlowMo(every, momentum, slow_lr, LocalSGD(base), **MODES[mode]), size, INNER[inner]).train()
        rule = (every, base, momentum, slow_lr, exact, late)
        assert_close(ours, naive.slowmo(start(), gradient, maker(INNER[inner]), LRS, size, *rule), what)
        for step in range(every, STEPS + 1, every) if exact and (momentum, slow_lr) != (0, 1) else ():
            assert_identical(ours[step - 1], f"after step {step} {what}")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sharded_is_bit_for_bit_what_it_is_without_shards(size: int) -> None:
    for every, base in ((1, 1), (2, 3), (3, 2)):
        sharded, whole = (Ranks(SlowMo(every, 0.6, 0.9, LocalSGD(base), sharded=s), size) for s in (True, False))
        assert_same(sharded.train(), whole.train(), f"with every {every}, {base}")


@pytest.mark.parametrize("mode", MODES)
def test_without_momentum_and_with_slow_lr_1_it_is_its_base_bit_for_bit(mode: str) -> None:
    off, base = Ranks(SlowMo(2, 0.0, 1.0, LocalSGD(3), **MODES[mode]), 3), Ranks(LocalSGD(3), 3)
    assert_same(off.train(), base.train())
    ours, theirs = off.optimizers[0].averaging, base.optimizers[0].averaging
    assert ours.telemetry.sent_bytes == theirs.telemetry.sent_bytes
    assert not any(state["optimizer"]["averaging"]["dgcopt"]["memory"].keys() - {"weights"} for state in off.states())


class Busy(LocalSGD):
    """Uses all that a base may use."""

    prepares = True

    def check(self, comm, names) -> None:
        if comm.size == 5:
            raise ConfigError("not among 5")

    def kind(self, name: str, param: Tensor) -> str:
        return name

    def start(self, x: Tensor, ctx: Weights) -> None:
        loaded = ctx.memory.take("total")
        ctx.scratch["total"] = torch.zeros_like(x) if loaded is None else loaded
        ctx.memory.hold("seen", lambda segment: segment.view(x))

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        ctx.scratch["total"] += 0.01 * x

    def exchange(self, x: Tensor, ctx: Weights):
        x = yield from super().exchange(x, ctx)
        ctx.memory.remember("seen", x).copy_(x)
        ctx.memory.on_commit(lambda: ctx.scratch["total"].add_(x))
        return x

    def saved(self, ctx: Weights) -> dict[str, Tensor]:
        return {"total": ctx.scratch["total"]}

    def merges(self, kind: str) -> bool:
        return kind != "total"


@pytest.mark.parametrize("mode", MODES)
def test_until_a_slow_step_the_base_does_all_that_it_does(mode: str) -> None:
    rule = SlowMo(100, base=Busy(2), **MODES[mode])
    ours, theirs = Ranks(rule, 3), Ranks(Busy(2), 3)
    assert_same(ours.train(), theirs.train())
    assert len(ours.optimizers[0].averaging.buckets()) == len(theirs.optimizers[0].averaging.buckets()) == 3
    for kind in ("seen", "total"):
        assert_same([memory_of(ours.states(), kind)], [memory_of(theirs.states(), kind)])
        assert rule.merges(kind) == Busy(2).merges(kind)
    with pytest.raises(ConfigError, match="not among 5"):
        Ranks(rule, 5)
    for name in ("meets", "in_turn", "prepares"):
        for value in (False, True):
            setattr(rule.base, name, value)
            assert getattr(rule, name) is value


def test_none_of_base_is_local_sgd_with_frequency_3() -> None:
    assert_same(Ranks(SlowMo(4), 2).train(), Ranks(SlowMo(4, 0.5, 1.0, LocalSGD(3)), 2).train())


@pytest.mark.parametrize("mode", ["sharded", "whole"])
@pytest.mark.parametrize("slow_lr", [1.0, 0.7])
def test_every_step_slow_it_is_momentum_sgd_on_the_whole_batch(slow_lr: float, mode: str) -> None:
    size = 4
    ours = Ranks(SlowMo(1, 0.6, slow_lr, **MODES[mode]), size, PLAIN)
    single = naive.copies(start())
    optimizer = SGD(as_groups(single), lr=0.1, momentum=0.6)
    for step, rates in enumerate(LRS, 1):
        by_rank = [gradient(step, rank, single) for rank in range(size)]
        for group, grads, lr in zip(optimizer.param_groups, total(by_rank), rates, strict=True):
            group["lr"] = slow_lr * lr
            for param, grad in zip(group["params"], grads, strict=True):
                param.grad = grad / size
        optimizer.step()
        for replica in ours.step(rates):
            torch.testing.assert_close(flat(replica), flat(single), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_learning_rate_of_zero_at_a_slow_step(mode: str) -> None:
    lrs = [(0.0, 0.05) if step in (3, 5) else rates for step, rates in enumerate(LRS)]  # 4 and 6 are slow steps
    ours = Ranks(SlowMo(2, 0.6, 0.8, LocalSGD(3), **MODES[mode]), 3, PLAIN).train(lrs)
    rule = (2, 3, 0.6, 0.8, mode in EXACT, "late" in mode)
    assert_close(ours, naive.slowmo(start(), gradient, maker(PLAIN), lrs, 3, *rule))


def test_a_single_rank_without_momentum_is_lookahead() -> None:
    ours, bare = Ranks(SlowMo(3, 0.0, 0.5), 1, PLAIN), Ranks(LocalSGD(1), 1, PLAIN)
    anchor = flat(start())
    for rates in LRS[:3]:
        slow, fast = flat(ours.step(rates)[0]), flat(bare.step(rates)[0])
    torch.testing.assert_close(slow, anchor + 0.5 * (fast - anchor), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "share"), [("sharded", 1 / 4), ("whole", 1 / 4), ("own", 1.0)])
def test_changes_below_a_rounding_step_of_half_precision_add_up(mode: str, share: float, dtype: torch.dtype) -> None:
    """Anchors in float32 are what ranks train; their weights are roundings of it, which slow steps do not take back."""
    ulp, steps = torch.finfo(dtype).eps, 16  # of numbers from 1 to 2
    rule = SlowMo(1, 0.0, 0.5, LocalSGD(64), **MODES[mode])
    weights = [nn.Parameter(torch.full((130,), 1.25, dtype=dtype)) for _ in range(4)]
    optimizers = [
        rule.attach(SGD([x], lr=1.0), comm=comm) for x, comm in zip(weights, dgcopt.simulated_world(4), strict=True)
    ]
    for _ in range(steps):
        for rank, (x, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            x.grad = torch.full_like(x, ulp if rank == 0 else 0.0)
            optimizer.step()
    assert torch.equal(weights[0], torch.full_like(weights[0], 1.25 - steps * 0.5 * ulp * share))


class TestState:
    @pytest.mark.parametrize("at", [1, 4, 6])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("mode", MODES)
    def test_a_loaded_run_goes_on_bit_for_bit(self, mode: str, dtype: torch.dtype, at: int) -> None:
        rule = SlowMo(4, 0.6, 0.8, LocalSGD(3), **MODES[mode])
        first, second, third = (Ranks(rule, 3, dtype=dtype) for _ in range(3))
        first.train(LRS[:at])
        second.load(first.states())
        third.load(second.states())  # before it has made a step
        rest = first.train(LRS[at:])
        assert_same(second.train(LRS[at:]), rest, "once loaded")
        assert_same(third.train(LRS[at:]), rest, "twice loaded")
        wide = torch.promote_types(dtype, torch.float32)
        for kind in ("slow anchor", "slow momentum"):
            assert all(t.dtype == wide for replica in memory_of(first.states(), kind) for t in replica[0])

    @pytest.mark.parametrize("mode", MODES)
    def test_it_holds_weights_unless_all_ranks_have_the_same(self, mode: str) -> None:
        ranks = Ranks(SlowMo(4, 0.6, 0.8, LocalSGD(3), **MODES[mode]), 2)
        for step, rates in enumerate(LRS, 1):
            replicas = ranks.step(rates)
            equal = step % 3 == 0 or (step % 4 == 0 and mode in EXACT)
            assert torch.equal(flat(replicas[0]), flat(replicas[1])) == equal
            assert ("weights" in ranks.states()[0]["optimizer"]["averaging"]["dgcopt"]["memory"]) != equal

    @pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 2)])
    @pytest.mark.parametrize("mode", ["sharded", "whole"])
    def test_another_number_of_ranks_goes_on_with_the_same_anchor_and_momentum(
        self, mode: str, before: int, after: int
    ) -> None:
        rule, at = SlowMo(4, 0.6, 0.8, LocalSGD(3), **MODES[mode]), 5
        left, come = Ranks(rule, before, PLAIN), Ranks(rule, after, PLAIN)
        left.train(LRS[:at])
        states = left.states()
        replicas = [state["weights"] for state in states]
        naive.average(replicas)  # where ranks go on; they would come to it by themselves, but only in their next step
        come.load([reshare(states, rank, after) for rank in range(after)])
        anchor, momentum = (memory_of(states, kind) for kind in ("slow anchor", "slow momentum"))
        whole = (total(anchor), total(momentum)) if mode == "sharded" else (anchor[0], momentum[0])
        settings = (4, 3, 0.6, 0.8, True, False, (*whole, at))
        theirs = naive.slowmo(replicas[0], gradient, maker(PLAIN), LRS[at:], after, *settings)
        assert_close(come.train(LRS[at:]), theirs)

    def test_a_shard_that_was_lost_with_its_rank_begins_anew(self) -> None:
        ranks = Ranks(SlowMo(4, 0.6, 0.8, LocalSGD(4)), 3, PLAIN)
        ranks.train(LRS[:5])
        anchor, momentum = (total(memory_of(ranks.states(), kind)[:2]) for kind in ("slow anchor", "slow momentum"))
        ranks.groups, ranks.optimizers = ranks.groups[:2], ranks.optimizers[:2]
        for optimizer, comm in zip(ranks.optimizers, dgcopt.simulated_world(2), strict=True):
            optimizer.averaging.rejoin(comm)
        replicas = [[[param.data for param in group] for group in mine] for mine in ranks.groups]
        naive.average(replicas)
        go_on = functools.partial(naive.slowmo, replicas[0], gradient, maker(PLAIN), LRS[5:8], 2, 4, 4)
        kept, lost = go_on(0.6, 0.8, begin=(anchor, momentum, 5)), go_on(0.0, 1.0, begin=(anchor, momentum, 5))
        is_lost = flat([naive.owners(group, 3) for group in start()]) == 2
        assert 0 < is_lost.sum() < len(is_lost)
        for ours, theirs, means in zip(ranks.train(LRS[5:8])[-1], kept[-1], lost[-1], strict=True):
            expected = torch.where(is_lost, flat(means), flat(theirs))
            torch.testing.assert_close(flat(ours), expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_buffers_that_are_laid_out_otherwise_are_refused(self, sharded: bool) -> None:
        saved, loaded = (Ranks(SlowMo(2, sharded=s), 2) for s in (sharded, not sharded))
        saved.train(LRS[:2])
        loaded.load(saved.states())
        with pytest.raises(ConfigError, match=f"SlowMo\\(sharded={sharded}\\)"):
            loaded.train(LRS[2:4])

    def test_each_rank_holds_its_shard_and_no_more(self) -> None:
        ranks = Ranks(SlowMo(2), 3)
        ranks.train(LRS[:4])
        states = ranks.states()
        anchors, shards = (memory_of(states, kind) for kind in ("slow anchor", "slow shard"))
        for rank, (anchor, shard) in enumerate(zip(anchors, shards, strict=True)):
            owned = torch.cat([(owner == rank).flatten() for group in start() for owner in naive.owners(group, 3)])
            assert torch.equal(flat(shard) == 1, owned) and torch.equal(flat(anchor) != 0, owned)
        for optimizer in ranks.optimizers:
            for ctx in optimizer.averaging.buckets().values():
                assert not ctx.memory
                assert {len(kept) for kept in ctx.scratch.values()} == {-(-ctx.numel // 3)}

    def test_buckets_built_anew_take_their_buffers_along(self) -> None:
        """Parameters are frozen, freed and added between slow steps, so that shards are cut elsewhere."""
        sharded, whole = (Ranks(SlowMo(4, 0.6, 0.8, LocalSGD(3), sharded=s), 3) for s in (True, False))
        for step in range(1, 17):
            for ranks in (sharded, whole):
                for mine, optimizer in zip(ranks.groups, ranks.optimizers, strict=True):
                    if step in (4, 7):  # when weights are equal
                        mine[0][0].requires_grad_(step == 7)
                    if step == 10:
                        mine.append([nn.Parameter(noise((37,), 0).clone())])
                        optimizer.add_param_group({"params": mine[-1]})
            ours, theirs = (ranks.step((0.1, 0.05, 0.1)) for ranks in (sharded, whole))
            assert_same([ours], [theirs], f"as step {step} is counted from 0")
            if step % 4 == 0:
                assert_identical(ours, f"after step {step}")


def test_the_anchor_is_what_a_warm_up_ends_with() -> None:
    ours = Ranks(SlowMo(2, 0.6, 0.8, LocalSGD(3), warmup_steps=3), 2, PLAIN).train()
    warm = ours[2][0]
    assert_identical(ours[2])
    later = naive.slowmo(warm, lambda step, *rest: gradient(step + 3, *rest), maker(PLAIN), LRS[3:], 2, 2, 3, 0.6, 0.8)
    assert_close(ours[3:], later)


class TestTraffic:
    def sent(self, rule: Averaging, size: int, steps: int = 6) -> int:
        ranks = Ranks(rule, size)
        ranks.train(LRS[:steps])
        return ranks.optimizers[0].averaging.telemetry.sent_bytes

    def test_a_sharded_slow_step_costs_an_allreduce_and_one_of_a_learning_rate(self) -> None:
        for size in (2, 3, 4, 8):
            of_lr = 3 * 2 * AllReduce(torch.empty(1, dtype=torch.float64)).sent(size)  # exchanges, groups
            beside = self.sent(SlowMo(2, base=LocalSGD(6)), size) - self.sent(LocalSGD(2), size) - of_lr
            assert beside == 0 if size != 3 else 0 < beside <= 3 * 2 * 2 * 2 * 8  # ... collectives, elements, bytes

    def test_a_slow_step_that_is_not_exact_costs_nothing(self) -> None:
        own = SlowMo(2, base=LocalSGD(2), sharded=False, exact=False)
        assert self.sent(own, 3) == self.sent(LocalSGD(2), 3)

    def test_ranks_without_data_do_not_count(self) -> None:
        xs = [torch.randn(128, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(3)]
        for sharded in (False, True):
            rule = SlowMo(1, 0.5, 0.9, sharded=sharded)
            contexts = []
            for rank in range(3):
                (bucket,) = build_buckets(
                    [("x", torch.zeros(128, dtype=torch.float64))], lambda *_: None, 1, 1, None, GradientBucket
                )
                place = Place(rank, 3, "average", 0, None, bucket.segments)
                ctx = Weights(place, Memory(bucket.segments), trained_by=ParameterGroup({"lr": 0.1}))
                rule.start(torch.ones(128, dtype=torch.float64), ctx)
                ctx.at(1).set_weight((1.5, 0.0, 1.5)[rank])
                contexts.append(ctx)
            results = dgcopt.simulate([rule.exchange(x.clone(), c) for x, c in zip(xs, contexts, strict=True)])
            for result in results:
                torch.testing.assert_close(result, 1 + 0.9 * ((xs[0] + xs[2]) / 2 - 1), rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_slow_step_that_fails_changes_nothing(self, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = Ranks(SlowMo(2, 0.5, 0.9, LocalSGD(100)), 2)
        ranks.train(LRS[:3])
        before = ranks.states()
        if loaded:
            ranks.load(before)
        start_collective = dgcopt.comm.SimulatedComm.start

        def fail(comm: Any, collective: Any) -> Any:
            if isinstance(collective, AllGather) and collective.group == "world":
                raise CommError("unplugged")
            return start_collective(comm, collective)

        monkeypatch.setattr(dgcopt.comm.SimulatedComm, "start", fail)
        with pytest.raises(CommError, match="unplugged"):
            ranks.step(LRS[3])
        for kind in ("slow anchor", "slow momentum", "slow shard"):
            assert_same([memory_of(ranks.states(), kind)], [memory_of(before, kind)])


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"every": 0}, "every must be a whole number of at least 1, not 0"),
            ({"every": 2.0}, "not 2.0"),
            ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
            ({"momentum": -0.1}, "not -0.1"),
            ({"momentum": float("nan")}, "not nan"),
            ({"momentum": True}, "not True"),
            ({"slow_lr": 0.0}, "slow_lr must be a positive number, not 0.0"),
            ({"slow_lr": -1.0}, "not -1.0"),
            ({"slow_lr": float("inf")}, "not inf"),
            ({"warmup_steps": -1}, "not -1"),
            ({"exact": False}, "exact=False needs sharded=False"),
            ({"faithful": True, "sharded": False}, "faithful=True needs sharded=True or exact=False"),
            ({"base": LocalSGD}, "base must be an algorithm that only exchanges weights after local steps"),
            ({"base": 3}, "not 3"),
            ({"base": SlowMo()}, "not SlowMo"),
            ({"base": DiLoCo()}, "not DiLoCo"),
            ({"base": LocalSGD(overlap=True)}, "must not overlap"),
            ({"base": LocalSGD(warmup_steps=5)}, "has warmup_steps. Give them to SlowMo instead"),
        ],
    )
    def test_settings_that_cannot_be(self, settings: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            SlowMo(**settings)
