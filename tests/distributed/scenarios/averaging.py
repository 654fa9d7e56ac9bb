"""Weights that are averaged: real ranks do what simulated ones do, and are told what goes wrong on any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt import Comm, DivergenceError, LocalSGD, MismatchError
from dgcopt.averaging import (
    SGP,
    SPARTA,
    Averaging,
    Decentralized,
    DiLoCo,
    Graph,
    LowPrecisionDecentralized,
    Ring,
    SlowMo,
    SparseLoCo,
)
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.comm import LocalComm
from tests.support.wires import only

from .collectives import regrouped
from .loops import normalised, refused
from .persistence import shared_folder
from .training import assert_close, assert_same_on_all_ranks, batch, make_model

Make = Callable[[Iterable[Tensor]], Optimizer]
PLAIN: Make = functools.partial(SGD, lr=0.1)
MOMENTUM: Make = functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM: Make = functools.partial(Adam, lr=0.01)


@dataclass(frozen=True)
class Star(Graph):
    """Everyone sends half of its weights to rank 0, who sends them on."""

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.5 / (size - 1))


STEPS = 7
AVERAGED: dict[str, tuple[Averaging, Make]] = {
    "LocalSGD": (LocalSGD(3), MOMENTUM),
    "LocalSGD, every step": (LocalSGD(1), PLAIN),
    "LocalSGD, overlap": (LocalSGD(2, overlap=True), ADAM),
    "LocalSGD, hierarchical": (LocalSGD(4, node_every=2), MOMENTUM),
    "LocalSGD, warm-up": (LocalSGD(3, warmup_steps=2), ADAM),
    "SlowMo": (SlowMo(4, base=LocalSGD(2)), MOMENTUM),
    "SlowMo, whole": (SlowMo(2, sharded=False, faithful=False), ADAM),
    "SlowMo, of each rank": (SlowMo(3, base=SGP(), sharded=False, exact=False), PLAIN),
    "SlowMo, faithful": (SlowMo(3, faithful=True, warmup_steps=1), MOMENTUM),
    "SGP": (SGP(), MOMENTUM),
    "SGP, ring, overlap": (SGP(Ring(), overlap=True), PLAIN),
    "SGP, not balanced": (SGP(Star()), PLAIN),
    "SGP, every other step": (SGP(Ring(directed=True), every=2, warmup_steps=1), ADAM),
    "SGP, hierarchical": (SGP(hierarchical=True), PLAIN),
    "Decentralized": (Decentralized(), MOMENTUM),
    "Decentralized, pairs": (Decentralized("shift_one", every=2), MOMENTUM),
    "Decentralized, hierarchical": (Decentralized("shift_one", hierarchical=True, warmup_steps=1), PLAIN),
    "LowPrecisionDecentralized": (LowPrecisionDecentralized(), MOMENTUM),
    "LowPrecisionDecentralized, hierarchical": (LowPrecisionDecentralized(2, hierarchical=True), PLAIN),
    "SPARTA": (SPARTA(0.1), ADAM),
    "SPARTA, strided, overlap": (SPARTA(0.3, "strided", overlap=True), MOMENTUM),
    "SPARTA, drift": (SPARTA(0.3, "drift", every=2, budgets={"*.bias": 1.0, "4.*": 0.0}), MOMENTUM),
    "DiLoCo": (DiLoCo(3), ADAM),
    "DiLoCo, streaming": (DiLoCo(6, fragments=2, delay=2, alpha=0.5), MOMENTUM),
    "DiLoCo, DGC": (DiLoCo(2, functools.partial(SGD, lr=0.7), dgcopt.DGC(0.1), warmup_steps=1), ADAM),
    "DiLoCo, unsent local": (DiLoCo(2, compression=dgcopt.TopK(0.1), unsent="local"), ADAM),
    "SparseLoCo": (SparseLoCo(3, 0.1, 64), ADAM),
}
"""Algorithms, each with an optimizer to go around."""

LIKE_OTHERS = {
    *("LocalSGD, every step", "LocalSGD, hierarchical", "SlowMo, whole", "SlowMo, of each rank", "SGP", "SPARTA"),
    *("SGP, every other step", "Decentralized", "Decentralized, hierarchical", "LowPrecisionDecentralized", "DiLoCo"),
    "SGP, hierarchical",
}
"""What others show as well of checkpoints."""


class Member:
    """One rank's training."""

    def __init__(self, rule: Averaging, make: Make, comm: Comm, model: Callable[[], nn.Module] = make_model) -> None:
        self.comm = comm
        self.model = model()
        self.optimizer: Any = make(self.model.parameters())
        rule.attach(self.optimizer, self.model.named_parameters(), comm)

    @property
    def averaging(self) -> Any:
        return self.optimizer.averaging

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def flat(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.parameters])

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, 0, self.comm, self.parameters[0].dtype)
        return mse_loss(self.model(x), y)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(members: Sequence[Member], steps: Iterable[int]) -> None:
    for step in steps:
        for member in members:
            member.backward(step)
        for member in members:
            member.optimizer.step()


def gathered(comm: Comm, mine: Tensor) -> Tensor:
    """Everyone's, a row each."""
    return comm.run(AllGather(mine.clone(), label="what all ranks have"))


# -- every algorithm -------------------------------------------------------------------------------------------------


def as_simulated_ranks(name: str, comm: Comm) -> None:
    """The same weights, with as many bytes; the same bits on all ranks where the algorithm says so."""
    rule, make = AVERAGED[name]
    mine, history = Member(rule, make, comm), []
    for step in range(1, STEPS + 1):
        train([mine], [step])
        history.append(mine.flat)
    histories = gathered(comm, torch.stack(history))
    for step in range(1, STEPS + 1):
        local = step - rule.warmup_steps
        if local <= 0 or (rule.due(local) and rule.identical(local) and not rule.overlap):
            rows = histories[:, step - 1]
            assert bool((rows == rows[0]).all()), f"{name}: ranks have other bits after step {step}"
    telemetry = mine.averaging.telemetry
    bytes_of_all = gathered(comm, torch.tensor([telemetry.payload_bytes, telemetry.sent_bytes]))
    assert telemetry.steps == STEPS and telemetry.sent_bytes > 0
    if comm.rank == 0:
        world = dgcopt.simulated_world(comm.size, comm.nodes)
        for other in world:
            other.sent = comm.sent  # type: ignore[method-assign]  # which small messages may take another way over
        simulated = [Member(rule, make, other) for other in world]
        for step in range(1, STEPS + 1):
            train(simulated, [step])
            there = torch.stack([member.flat for member in simulated])
            assert_close([histories[:, step - 1]], [there], 1e-9, f"{name} after step {step}")
        for member, (payload, sent) in zip(simulated, bytes_of_all.tolist(), strict=True):
            telemetry = member.averaging.telemetry
            assert (payload, sent) == (telemetry.payload_bytes, telemetry.sent_bytes), f"{name}: other bytes went out"


def can_be_looked_at(comm: Comm) -> None:
    """How far ranks are apart, and what their mean is: neither changes anything, nor is it counted."""
    for name in ("LocalSGD", "LocalSGD, overlap", "LocalSGD, warm-up", "SGP", "DiLoCo, streaming", "SPARTA, drift"):
        rule, make = AVERAGED[name]
        mine, undisturbed = (Member(rule, make, comm) for _ in range(2))
        for step in range(1, STEPS + 1):
            train([mine, undisturbed], [step])
            if rule.overlap and step < STEPS:
                continue  # an exchange under way would have to be waited for
            mine.averaging.finish_round()
            sent = mine.averaging.telemetry.payload_bytes
            distance, rows = mine.averaging.consensus_distance(), gathered(comm, mine.flat)
            center = rows.mean(0)
            by_hand = float((rows - center).square().sum(1).mean().sqrt())
            assert abs(distance - by_hand) <= 1e-9 * by_hand + 1e-12, f"{name}: {distance} is not {by_hand}"
            local = step - rule.warmup_steps
            assert distance > 1e-6 or rule.due(local) or local <= 0, f"{name}: equal after step {step}"
            before = mine.flat
            with mine.averaging.averaged():
                assert_close([mine.flat], [center], 1e-12, f"{name}, averaged")
                assert_same_on_all_ranks(comm, [mine.flat], f"{name}, averaged")
            assert torch.equal(before, mine.flat), "weights did not come back"
            assert sent == mine.averaging.telemetry.payload_bytes
        undisturbed.averaging.finish_round()
        assert_close([mine.flat], [undisturbed.flat], 1e-9, f"{name}, looked at")
        mine.averaging.average()
        assert_same_on_all_ranks(comm, [mine.flat], f"{name}, at the end")
        assert mine.averaging.consensus_distance() < 1e-12


def training_continues(comm: Comm) -> None:
    """From a checkpoint, in the middle of windows, or while exchanges are under way.

    One process goes on from the mean of all ranks' weights.
    """
    saved_after = 4
    chosen = {name: how for name, how in AVERAGED.items() if name not in LIKE_OTHERS}
    whole = {name: Member(*how, comm) for name, how in chosen.items()}
    train([*whole.values()], range(saved_after))
    rows = {name: gathered(comm, member.flat) for name, member in whole.items()}
    with shared_folder(comm) as folder:
        states = {name: member.state() for name, member in whole.items()}
        dgcopt.checkpoint.save(folder, states, saved_after, comm)
        loaded = dgcopt.checkpoint.load(folder, comm)
        for_one = dgcopt.checkpoint.load(folder, LocalComm())
    assert loaded is not None and for_one is not None
    resumed = {name: Member(*how, comm) for name, how in chosen.items()}
    train([*resumed.values()], range(50, 52))  # an optimizer that has been used forgets what it was
    for name, member in resumed.items():
        member.load(loaded[1][name])
    train([*whole.values(), *resumed.values()], range(saved_after, STEPS))
    for name, member in resumed.items():
        # libraries add up in another order from one time to the next
        assert_close([member.flat], [whole[name].flat], 1e-12, name)
        assert member.averaging.step == whole[name].averaging.step == STEPS
    for name in [*chosen][comm.rank :: comm.size]:
        alone = Member(*chosen[name], LocalComm())
        alone.load(for_one[1][name])
        alone.averaging.average()
        assert_close([alone.flat], [rows[name].mean(0)], 1e-9, f"{name}, in one process")
        train([alone], range(saved_after, STEPS))
        assert bool(alone.flat.isfinite().all())


def buffers_come_along(comm: Comm) -> None:
    """Batch norm's statistics are those of rank 0 after an exchange at a multiple of so many steps, else their own."""
    for rule, every in ((LocalSGD(2), 4), (LocalSGD(1, overlap=True), 2), (SGP(), 2), (LocalSGD(2, warmup_steps=3), 1)):
        mine = Member(rule, PLAIN, comm, functools.partial(normalised, 3))
        dgcopt.sync_buffers(mine.model, mine.optimizer, every)
        for step in range(1, 5 + rule.warmup_steps):
            mine.backward(step)
            before = [gathered(comm, buffer.double()) for buffer in mine.model.buffers()]
            mine.optimizer.step()
            local = step - rule.warmup_steps
            shared = local <= 0 or (rule.due(local) and local % every == 0)
            for rows, buffer in zip(before, mine.model.buffers(), strict=True):
                found = rows[0 if shared else comm.rank]
                assert torch.equal(buffer.double(), found), f"{rule}: buffers after step {step}"
        assert not torch.equal(before[0][0], before[0][1]), "they were the same before"
        mine.averaging.average()
        assert_same_on_all_ranks(comm, [*mine.model.buffers()], "in the end")


def buffers_of_the_last(comm: Comm) -> None:
    """Ranks that have run out of data take over the statistics of one that had some."""
    mine = Member(LocalSGD(2), PLAIN, comm, functools.partial(normalised, 3))
    dgcopt.sync_buffers(mine.model, mine.optimizer)
    with dgcopt.join(mine.optimizer):
        train([mine], range(batches_of(comm.rank)))
        last = mine.model[1].running_mean.clone()
    assert_same_on_all_ranks(comm, [*mine.model.buffers()], "after join")
    assert torch.equal(gathered(comm, last)[-1], mine.model[1].running_mean), "not the last one's"


def uneven_data_is_an_error(comm: Comm) -> None:
    """If asked for, at the first exchange that some ranks have no data for; where all end alike, all is averaged."""
    mine = Member(LocalSGD(2), PLAIN, comm)
    with dgcopt.join(mine.optimizer, throw_on_early_termination=True):
        train([mine], range(3))
    assert_same_on_all_ranks(comm, mine.parameters, "an even end")
    with (
        refused(comm, dgcopt.OutOfData, f"rank(s) 0 of {comm.size} have run out"),
        dgcopt.join(mine.optimizer, throw_on_early_termination=True),
    ):
        train([mine], range(batches_of(comm.rank)))
    usable(comm)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def usable(comm: Comm) -> None:
    assert comm.run(AllReduce(torch.ones(3), op="sum", label="after an error")).tolist() == [comm.size] * 3


def schedules_differ(comm: Comm) -> None:
    """Found when the optimizer is wrapped."""
    for settings in ({"every": 8 if comm.rank else 4}, {"every": 4, "overlap": comm.rank == 1}):
        (name,) = [name for name in settings if name != "every" or len(settings) == 1]
        with refused(comm, MismatchError, f"rank {comm.rank}", f"{name}={settings[name]}", "LocalSGD(", "rank 1 has"):
            Member(LocalSGD(**settings), PLAIN, comm)
        usable(comm)


def weights_differ_at_the_start(comm: Comm) -> None:
    """Found at the first step; once they have been broadcast, training goes on."""
    for rule in (LocalSGD(2), LocalSGD(2, overlap=True), LocalSGD(2, warmup_steps=1), SlowMo(2)):
        mine = Member(rule, PLAIN, comm)
        if comm.rank == comm.size - 1:
            mine.model.get_parameter("2.bias").data[3] += 1e-12
        mine.backward(0)
        with refused(comm, DivergenceError, f"rank {comm.rank}", "'2.bias'", f"[{comm.size - 1}]", "broadcast"):
            mine.optimizer.step()
        usable(comm)
        dgcopt.broadcast_parameters(mine.model.state_dict(), comm=comm)
        train([mine], range(2 + rule.warmup_steps))
        mine.averaging.finish_round()
        assert_same_on_all_ranks(comm, mine.parameters, "after broadcast")


def weights_are_not_finite(comm: Comm) -> None:
    """Found before anything is averaged, by all ranks; mended, training goes on."""
    last = comm.size - 1
    for rule in (LocalSGD(2), LocalSGD(2, overlap=True)):
        mine = Member(rule, PLAIN, comm)
        train([mine], range(1))
        mine.backward(1)
        bias = mine.model.get_parameter("2.bias")
        kept = bias.detach().clone()
        if comm.rank == last:
            bias.data[3] = (torch.nan, torch.inf)[rule.overlap]
        words = [f"rank {comm.rank}: after local step 2", f"rank(s) [{last}] hold NaN or Inf", "Nothing was averaged"]
        with refused(comm, DivergenceError, *words, *(["'2.bias'"] if comm.rank == last else [])):
            mine.optimizer.step()
            before = mine.flat
            mine.optimizer.step()
        usable(comm)
        rows = gathered(comm, mine.flat)
        assert bool(rows[:last].isfinite().all()) and not bool(rows[last].isfinite().all())
        assert comm.size == 2 or not torch.equal(rows[0], rows[1]), "something was averaged"
        assert not rule.overlap or torch.equal(before.nan_to_num(), mine.flat.nan_to_num()), "the step went on"
        with torch.no_grad():
            bias.copy_(kept)
        train([mine], range(2, 2 + 2))
        mine.averaging.finish_round()
        assert_same_on_all_ranks(comm, mine.parameters, "mended")


# -- training loops --------------------------------------------------------------------------------------------------


def batches_of(rank: int) -> int:
    return 3 + 2 * rank


def by_hand(comm: Comm, every: int, divide_by: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Local SGD of all ranks in one process: weights once all have run out of data, and after another epoch."""
    models = [make_model() for _ in range(comm.size)]
    optimizers = [MOMENTUM(model.parameters()) for model in models]
    left = [batches_of(rank) for rank in range(comm.size)]
    step, since, found = 0, [0] * comm.size, []
    for _ in range(2):
        while any(left) or any(since):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if left[rank]:
                    x, y = batch(step, 0, None)
                    optimizer.zero_grad()
                    mse_loss(model(x[rank :: comm.size]), y[rank :: comm.size]).backward()
                    optimizer.step()
                    since[rank] += 1
                    left[rank] -= 1
            step += 1
            if step % every == 0:
                counted = [rank for rank in range(comm.size) if since[rank] or divide_by == "all"]
                with torch.no_grad():
                    for params in zip(*(model.parameters() for model in models), strict=True):
                        center = sum(params[rank] for rank in counted) / len(counted)
                        for param in params:
                            param.copy_(center)
                since = [0] * comm.size
        found.append(torch.cat([param.detach().flatten() for param in models[0].parameters()]))
        left = [epoch] * comm.size
    return found[0], found[1]


def uneven_data(comm: Comm) -> None:
    """Rank r has 3 + 2r batches: means are of the ranks that have made a step since the last one, or of all."""
    for every in (2, 3):
        for divide_by in ("active", "all"):
            mine = Member(LocalSGD(every, overlap=every == 2), MOMENTUM, comm)
            with dgcopt.join(mine.optimizer, divide_by=divide_by):  # type: ignore[arg-type]
                train([mine], range(batches_of(comm.rank)))
            what = f"every {every} steps, divided by {divide_by}"
            assert_same_on_all_ranks(comm, mine.parameters, what)
            joined, after = by_hand(comm, every, divide_by, epoch=2 * every)
            assert_close([mine.flat], [joined], 1e-9, what)
            train([mine], range(mine.averaging.step, mine.averaging.step + 2 * every))
            mine.averaging.finish_round()
            if every == 3:
                assert_close([mine.flat], [after], 1e-9, f"{what}, in the next epoch")
            assert_same_on_all_ranks(comm, mine.parameters, f"{what}, in the next epoch")


def uneven_data_of_others(comm: Comm) -> None:
    """Nobody waits for ever, all go on from the same step, and the next epoch does what it should."""
    for name in (
        *("LocalSGD, hierarchical", "SlowMo", "SGP", "Decentralized", "LowPrecisionDecentralized, hierarchical"),
        *("SPARTA, strided, overlap", "DiLoCo", "DiLoCo, streaming", "SparseLoCo"),
    ):
        rule, make = AVERAGED[name]
        mine = Member(rule, make, comm)
        with dgcopt.join(mine.optimizer):
            train([mine], range(batches_of(comm.rank)))
        step = mine.averaging.step
        assert_same_on_all_ranks(comm, [torch.tensor(step)], f"{name}: the number of steps")
        assert step >= batches_of(comm.size - 1) and rule.due(step), f"{name}: left after step {step}"
        if rule.identical(step):
            assert_same_on_all_ranks(comm, [mine.flat], name)
        train([mine], range(20, 24))
        mine.averaging.average()
        assert mine.averaging.step == step + 4
        assert_same_on_all_ranks(comm, [mine.flat], f"{name}, in the next epoch")
        assert bool(mine.flat.isfinite().all())


def loss_scaling(comm: Comm) -> None:
    """An overflow is that rank's alone, or all ranks' while gradients are averaged, or its machine's.

    In a warm-up such a step does not count, and what is held back is free of the scale.
    """
    last, pairs = comm.size - 1, comm.wire != "mpi" and comm.size == 4
    mates: dict[str, set[int]] = {"alone": {last}, "warm-up": set(range(comm.size))}
    if pairs:
        halves = [comm.among([0, 1]), comm.among([2, 3])]
        mates["pairs"] = {2, 3}
    for case, together in mates.items():
        model = make_model(torch.float32)
        optimizer = PLAIN(model.parameters())
        if case == "pairs":
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=halves[comm.rank // 2])
        rule = LocalSGD(2, warmup_steps=4 if case == "warm-up" else 0)
        rule.attach(optimizer, model.named_parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        for step in range(7 if case == "warm-up" else 6):
            optimizer.zero_grad()
            x, y = batch(step, 0, comm, torch.float32)
            loss = mse_loss(model(x), y)
            scaler.scale(loss * torch.inf if step == 2 and comm.rank == last else loss).backward()
            before = torch.cat([param.detach().flatten() for param in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
            stayed = torch.equal(before, torch.cat([param.detach().flatten() for param in model.parameters()]))
            assert stayed == (step == 2 and comm.rank in together), f"{case}, step {step}: rank {comm.rank}"
        assert scaler.get_scale() == (128.0 if comm.rank in together else 256.0), case
        assert optimizer.averaging.step == 6  # type: ignore[attr-defined]
        assert_same_on_all_ranks(comm, model.parameters(), case)
    ends = []
    for scales in ([1.0] * 5, [4.0, 64.0, 2.0, 128.0, 8.0]):
        model = make_model(torch.float32)
        optimizer = PLAIN(model.parameters())
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.TopK(0.1), comm=comm)
        LocalSGD(2, warmup_steps=4).attach(optimizer, model.named_parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        for step, scale in enumerate(scales):
            if step:
                scaler.update(scale)
            optimizer.zero_grad()
            x, y = batch(step, 0, comm, torch.float32)
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*ends), "what was held back counted for more, or less, with the scale"


def gradients_within_a_machine_and_weights_over_all(comm: Comm) -> None:
    """As docs/averaging.md has it: on each machine the mean gradient at every step, and the mean of all weights."""
    grouped = regrouped(comm, [2 * rank // comm.size for rank in range(comm.size)])
    on_machine = list(grouped.ranks("node"))
    for rule in (LocalSGD(2), SlowMo(2, base=LocalSGD(2))):
        mine, by_hand = Member(rule, PLAIN, grouped), Member(rule, PLAIN, grouped)
        named = mine.model.named_parameters()
        optimizer = dgcopt.DistributedOptimizer(mine.optimizer, named, process_set="node", comm=grouped)
        for step in range(1, 4):
            mine.backward(step)
            optimizer.step()
            by_hand.backward(step)
            grads = torch.cat([param.grad.flatten() for param in by_hand.parameters if param.grad is not None])
            means = gathered(comm, grads)[on_machine].mean(0).split([param.numel() for param in by_hand.parameters])
            for param, grad in zip(by_hand.parameters, means, strict=True):
                param.grad = grad.view_as(param)
            by_hand.optimizer.step()
            what = f"{rule!r} after step {step}"
            assert_close([mine.flat], [by_hand.flat], 1e-9, what)
            rows = gathered(comm, mine.flat)
            alike = (rows == rows[comm.rank]).all(1).nonzero().flatten().tolist()
            assert alike == list(range(comm.size) if rule.due(step) else on_machine), f"{what}: {alike} are alike"
        sent = optimizer.telemetry.sent_bytes
        assert (sent > 0) == (len(on_machine) > 1), f"{sent} bytes on a machine of {len(on_machine)}"


@only(wires=["torch"])
def as_torchs_averager(comm: Comm) -> None:
    """PeriodicModelAverager, whose first call averages: after step 1, H + 1, ...; told to wait for H - 1, as ours."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    group = comm.process_group  # type: ignore[attr-defined]
    for every in (2, 3):
        # plain SGD: a dense first step is a local one whose result is averaged
        for rule, make, first in (
            (LocalSGD(every), MOMENTUM, every - 1),
            (LocalSGD(every), ADAM, every - 1),
            (LocalSGD(every, warmup_steps=1), PLAIN, 0),
        ):
            mine = Member(rule, make, comm)
            model = make_model()
            optimizer = make(model.parameters())
            averager = PeriodicModelAverager(every, warmup_steps=first, process_group=group)
            for step in range(8):
                optimizer.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(model(x), y).backward()
                optimizer.step()
                averager.average_parameters(model.parameters())
                train([mine], [step])
                assert_close(mine.parameters, list(model.parameters()), 1e-12, f"{rule} after step {step + 1}")


def ranks_come_and_go(comm: Comm) -> None:
    """`rejoin`, in the middle of a window: the next step is made from the mean of the weights that there are."""
    mine = Member(LocalSGD(4), PLAIN, comm)
    for where in (comm, LocalComm(), comm):
        train([mine], range(2))
        center = gathered(comm, mine.flat).mean(0) if where.size > 1 else mine.flat
        mine.averaging.rejoin(where)
        mine.optimizer.param_groups[0]["lr"] = 0.0
        train([mine], range(2, 3))
        assert_close([mine.flat], [center], 1e-12, f"rejoined {where.wire}")
        mine.optimizer.param_groups[0]["lr"] = 0.1
        train([mine], range(3, 4))
        assert torch.equal(*gathered(comm, mine.flat)[:2]) == (where.size > 1), "after the fourth step"
    assert mine.averaging.step == 12


def ranks_train_different_parameters(comm: Comm) -> None:
    mine = Member(LocalSGD(2), PLAIN, comm)
    train([mine], range(3))
    mine.model.get_parameter("2.weight").requires_grad_(comm.rank != comm.size - 1)
    mine.backward(3)
    with refused(comm, MismatchError, "requires_grad"):
        mine.optimizer.step()
    gathered(comm, mine.flat)  # the wire goes on


RULES: dict[str, Callable[[Comm], Any]] = {
    f"averaging: {name}": functools.partial(as_simulated_ranks, name) for name in AVERAGED
}

IN_TRAINING: dict[str, Callable[[Comm], Any]] = {
    f"averaging: {function.__name__}": function
    for function in (
        can_be_looked_at,
        buffers_come_along,
        buffers_of_the_last,
        training_continues,
        schedules_differ,
        weights_differ_at_the_start,
        weights_are_not_finite,
        uneven_data,
        uneven_data_is_an_error,
        uneven_data_of_others,
        loss_scaling,
        gradients_within_a_machine_and_weights_over_all,
        as_torchs_averager,
        ranks_come_and_go,
        ranks_train_different_parameters,
    )
}

SCENARIOS = RULES | IN_TRAINING
