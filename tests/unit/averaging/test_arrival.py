"""A round whose messages are damaged, or that an exception interrupts while it is written, on simulated ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import dgcopt
from dgcopt import SPARTA, Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized, SlowMo, SparseLoCo
from dgcopt.averaging import SGP, Averaging, Rounds
from dgcopt.collectives import Broadcast, SendRecv
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import same, small_batch, small_model

SIZE, NODES, SENDER = 4, 2, 2
"""The sender is the first rank of the second machine."""

RULES: dict[str, Averaging] = {
    "LocalSGD": LocalSGD(every=2),
    "LocalSGD overlap": LocalSGD(every=2, overlap=True),
    "LocalSGD in machines": LocalSGD(every=8, node_every=2),
    "SlowMo": SlowMo(every=2),
    "SlowMo whole": SlowMo(every=2, sharded=False),
    "SlowMo base": SlowMo(every=4, base=LocalSGD(every=2)),
    "SPARTA": SPARTA(0.1, every=2),
    "SPARTA drift": SPARTA(0.5, "drift", every=2),
    "Decentralized": Decentralized("all", every=2),
    "Decentralized hierarchical": Decentralized("all", every=2, hierarchical=True),
    "DiLoCo": DiLoCo(every=2),
    "DiLoCo bf16": DiLoCo(every=2, compression=dgcopt.BF16()),
    "DiLoCo PowerSGD": DiLoCo(every=2, compression=dgcopt.PowerSGD()),
    "DiLoCo TopK": DiLoCo(every=2, compression=dgcopt.TopK(0.1)),
    "DiLoCo TopK owner": DiLoCo(every=2, compression=dgcopt.TopK(0.1, reduce="owner")),
    "DiLoCo fragments": DiLoCo(every=4, fragments=2, delay=1, alpha=0.5),
    "DiLoCo unsent local": DiLoCo(every=2, compression=dgcopt.TopK(0.1), unsent="local"),
    "SparseLoCo": SparseLoCo(every=2, warmup=()),
}


class World:
    """Four ranks on two machines, averaged by a rule."""

    def __init__(self, rule: Averaging, size: int = SIZE, nodes: int = NODES) -> None:
        self.comms = dgcopt.simulated_world(size, nodes)
        self.models = [small_model(torch.float32) for _ in range(size)]
        self.optimizers: list[Any] = [
            copy.deepcopy(rule).attach(SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), comm)
            for model, comm in zip(self.models, self.comms, strict=True)
        ]

    def step(self, seed: int) -> list[Exception]:
        """A local step on all ranks, and the round that it makes due, to its end; returns each rank's error."""
        inputs, targets = small_batch(seed=seed, dtype=torch.float32)
        errors: list[Exception] = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[rank::SIZE]), targets[rank::SIZE]).backward()
        for act in (lambda o: o.step(), lambda o: o.averaging.finish_round()):
            for optimizer in self.optimizers:
                try:
                    act(optimizer)
                except Exception as error:
                    errors.append(error)
        return errors

    def kept(self, rank: int) -> dict[str, Any]:
        """Weights, and all that a round may change."""
        rounds, outers = self.optimizers[rank].averaging, []
        for outer in rounds.outers:
            engine = synchronised(outer).engine
            held = engine.store.state()
            outers.append((outer.state_dict()["state"], engine.step, held["memory"], held["shared"]))
        memory = {kind: held for kind, held in rounds.state()["memory"].items() if kind not in ("weights", "outgoing")}
        anchors = [anchor.detach() for anchor in getattr(rounds.sync, "anchors", {}).values()]
        weights = [param.detach() for param in self.models[rank].parameters()]
        return copy.deepcopy({"weights": weights, "memory": memory, "anchors": anchors, "outers": outers})

    def assert_finite(self) -> None:
        for model in self.models:
            assert all(bool(param.isfinite().all()) for param in model.parameters())


def strike(comm: dgcopt.Comm, number: int) -> list[Any]:
    """Make NaN of a message of weights that a rank sends from now on, by its number; returns all that it sends."""
    start, sent = comm.start, list[Any]()

    def changed(collective: Any) -> Any:
        if " round " in collective.label and not (isinstance(collective, Broadcast) and collective.root != 0):
            if len(sent) == number:
                collective.tensor.view(-1).view(torch.uint8).fill_(0xFF)
            sent.append(collective)
        return start(collective)

    comm.start = changed  # type: ignore[method-assign]
    return sent


def kept_before_the_round(world: World) -> list[dict[str, Any]]:
    """Filled with what each rank has once its next local step is made, before the round begins."""
    found: list[dict[str, Any]] = [{} for _ in world.models]
    for rank, optimizer in enumerate(world.optimizers):
        rounds = optimizer.averaging

        def noting(rank: int = rank, rounds: Any = rounds, after: Callable[[], None] = rounds.after_step) -> None:
            found[rank] = world.kept(rank)
            rounds.after_step = after
            after()

        rounds.after_step = noting
    return found


@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo", "SlowMo base"])
def test_join_ends_when_each_round_is_skipped(name: str) -> None:
    """Ranks that have run out of data would ask for another round for ever, as none brings what they still have."""
    world = World(RULES[name])
    start = world.comms[SENDER].start

    def damaged(collective: Any) -> Any:
        if " round " in collective.label:
            collective.tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return start(collective)

    message = r"had run out of data.*averaging\.average\(\)"
    with pytest.raises(dgcopt.PayloadError, match=message), ExitStack() as ends:
        for optimizer in world.optimizers:
            ends.enter_context(dgcopt.join(optimizer))
        assert not world.step(0)
        world.comms[SENDER].start = damaged  # type: ignore[method-assign]
    for optimizer in world.optimizers[1:]:  # as simulated; processes of their own raise as they leave
        with pytest.raises(dgcopt.PayloadError, match=message):
            optimizer.averaging.finish_round()
    assert [optimizer.averaging.telemetry.skipped for optimizer in world.optimizers] == [1] * SIZE
    world.comms[SENDER].start = start  # type: ignore[method-assign]
    for optimizer in world.optimizers:
        optimizer.averaging.average()
    world.assert_finite()
    steps = {optimizer.averaging.step for optimizer in world.optimizers}
    assert len(steps) == 1, steps


@pytest.mark.parametrize("name", RULES)
def test_nan_that_arrives_skips_the_round_on_all_ranks(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each message of the second round in turn; the rounds after it are made as ever."""
    number, rule = 0, RULES[name]
    while True:
        world = World(rule)
        for seed in range(3):
            assert not world.step(seed)
        before, sent = kept_before_the_round(world), strike(world.comms[SENDER], number)
        caplog.clear()
        errors = world.step(3)
        if number >= len(sent):
            break
        told = sent[number].describe()
        skipped = [optimizer.averaging.telemetry.skipped for optimizer in world.optimizers]
        if errors:
            assert [type(error) for error in errors] == [dgcopt.PayloadError] * SIZE, (told, errors)
        else:
            assert skipped == [1] * SIZE, told
            words = [record.getMessage() for record in caplog.records]
            assert sum("after local step 4 is skipped, on all ranks" in word for word in words) == SIZE, words
            assert any("NaN or Inf arrived in bucket" in word for word in words), words
        for rank, then in enumerate(before):
            now = world.kept(rank)
            assert same(now, then), f"{told}, rank {rank}: {[key for key in now if not same(now[key], then[key])]}"
        for seed in range(4, 8):
            assert not world.step(seed), told
        world.assert_finite()
        assert [optimizer.averaging.telemetry.skipped for optimizer in world.optimizers] == skipped
        if rule.identical(8):
            weights = [world.kept(rank)["weights"] for rank in range(SIZE)]
            assert all(same(weights[0], other) for other in weights)
        number += 1
    assert number


def test_nan_that_a_peer_has_sent_is_an_error_of_the_rank_that_receives_it() -> None:
    world = World(SGP(), SIZE, 1)
    assert not world.step(0)
    before = kept_before_the_round(world)
    assert strike(world.comms[SENDER], 0) == []
    errors = world.step(1)
    assert errors and all(isinstance(error, dgcopt.PayloadError) for error in errors), errors
    receiver = int(str(errors[0]).split(":")[0].removeprefix("rank "))
    assert receiver != SENDER and "NaN or Inf arrived in bucket 0" in str(errors[0])
    assert same(world.kept(receiver), before[receiver])
    world.assert_finite()
    for call in (world.optimizers[receiver].step, world.optimizers[receiver].state_dict):
        with pytest.raises(
            dgcopt.InterruptedStep, match=rf"^rank {receiver}: .* the weights of its peers .* checkpoint"
        ):
            call()


def test_weights_fetched_in_a_skipped_first_round_are_not_kept() -> None:
    """Replicas of the neighbours' weights would be NaN for ever."""
    world, number = World(LowPrecisionDecentralized(), SIZE, 1), 0
    start = world.comms[SENDER].start

    def damaged(collective: Any) -> Any:
        nonlocal number
        if isinstance(collective, SendRecv) and " round " in collective.label:
            number += 1
            if number <= 2:
                collective.tensor.fill_(torch.nan)
        return start(collective)

    with ExitStack() as ends:
        for optimizer in world.optimizers:
            ends.enter_context(dgcopt.join(optimizer))
        world.comms[SENDER].start = damaged  # type: ignore[method-assign]
        for seed in range(4):
            assert not world.step(seed)
        assert number == 4 + 4 + 2 + 2 and {o.averaging.telemetry.skipped for o in world.optimizers} == {1}
        contexts = [next(iter(optimizer.averaging.buckets().values())) for optimizer in world.optimizers]
        for rank, ctx in enumerate(contexts):
            left, right = ctx.scratch["replicas"]
            assert torch.equal(left, contexts[rank - 1].memory["own"])
            assert torch.equal(right, contexts[(rank + 1) % SIZE].memory["own"])
    world.assert_finite()


# -- interrupted while it is written ---------------------------------------------------------------------------------


class Interrupted(Exception):
    """Injected."""


def is_half_written(rounds: Rounds) -> bool:
    try:
        rounds.commit.check(rounds.comm.rank)
    except dgcopt.InterruptedStep:
        return True
    return False


WRITING = ("commit", "commit_memory", "commit_gradients", "committed", "complete", "write_back")


@contextmanager
def interrupting(rounds: Rounds, line: int) -> Iterator[list[int]]:
    """Within it, an exception comes before the line of that number which is run while a round is written."""
    lines: list[int] = []

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and is_half_written(rounds):  # in which no other rank has its turn
            lines.append(frame.f_lineno)
            if len(lines) > line:
                raise Interrupted
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        is_ours = frame.f_globals["__name__"].startswith(("dgcopt.averaging.", "dgcopt.exchange."))
        return local if is_ours and frame.f_code.co_name in WRITING else None

    sys.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(None)


def goes_on(world: World, saved: list[Any]) -> list[dict[str, Any]]:
    """What ranks have two rounds after state was loaded."""
    for model, optimizer, (of_model, of_optimizer) in zip(world.models, world.optimizers, saved, strict=True):
        model.load_state_dict(of_model)
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))
    for seed in range(2, 6):
        assert not world.step(seed)
    return [world.kept(rank) for rank in range(len(world.models))]


@pytest.mark.parametrize("name", ["LocalSGD", "LocalSGD overlap", "SlowMo", "DiLoCo", "DiLoCo fragments"])
def test_a_round_that_is_half_written_is_told_until_state_is_loaded(name: str) -> None:
    """Rank 1 is interrupted before each line that writes the second round."""
    world = World(RULES[name], 2, 1)
    for seed in range(2):
        assert not world.step(seed)
    saved = [
        copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in zip(world.models, world.optimizers, strict=True)
    ]
    undisturbed, line, told = goes_on(World(RULES[name], 2, 1), saved), 0, 0
    while True:
        world = World(RULES[name], 2, 1)
        for seed in range(3):
            assert not world.step(seed)
        rounds = world.optimizers[1].averaging
        with interrupting(rounds, line) as lines:
            errors = world.step(3)
        if len(lines) <= line:
            break
        assert [type(error) for error in errors].count(Interrupted) == 1, errors
        for _ in range(2):
            with pytest.raises(dgcopt.InterruptedStep, match=r"^rank 1: .* Restore all ranks from a checkpoint"):
                world.optimizers[1].step()
            told += 1
        assert same(goes_on(world, saved), undisturbed)
        line += 1
    assert told >= 4
