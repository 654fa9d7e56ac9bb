"""Auto on simulated ranks, whose wire has a clock and a speed of its own."""

from __future__ import annotations

import csv
import functools
import gc
import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.collectives import AllReduce, Collective
from dgcopt.comm import simulated
from dgcopt.compressors.tuner import Change
from dgcopt.errors import ConfigError, MismatchError
from dgcopt.tuning import auto, clock, tuner
from dgcopt.tuning.candidate import Candidate
from dgcopt.tuning.costs import record_recipe
from dgcopt.tuning.forecast import grow, probe_sizes, shortlist, shrink
from dgcopt.tuning.trials import Trials
from dgcopt.tuning.tuner import AutoTuner
from dgcopt.tuning.wire import wire_bytes
from tests.support.worlds import Ranks, bucket_of, context_of, small_model

SGD = torch.optim.SGD


class Wire:
    """Seconds on the clock, and the cost of collectives: rank 0's count for all."""

    def __init__(self) -> None:
        self.time = 0.0
        self.speed = 1e9
        self.latency = 1e-5
        self.node_speed = 1e12

    def carry(self, collective: Collective, size: int) -> None:
        speed = self.node_speed if collective.group == "node" else self.speed
        sent = wire_bytes(type(collective).__name__, collective.nbytes, size)
        self.time += (self.latency if collective.group != "node" else 0.0) + sent / speed


@pytest.fixture(scope="module", autouse=True)
def _old_objects() -> None:
    """Each recording looks for garbage: among its own objects only, not among what tests and torch have left."""
    gc.freeze()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire, start = Wire(), simulated._World.start

    def timed(self: Any, rank: int, channel: Any, ranks: tuple[int, ...], collective: Collective) -> Any:
        if rank == 0:
            wire.carry(collective, len(ranks))
        return start(self, rank, channel, ranks, collective)

    monkeypatch.setattr(simulated._World, "start", timed)
    monkeypatch.setattr(clock, "now", lambda: wire.time)
    return wire


def sgd(momentum: float = 0.0) -> Callable[..., torch.optim.Optimizer]:
    return lambda params: SGD(params, lr=0.1, momentum=momentum)


def steps(ranks: Ranks, wire: Wire, number: int, until: Callable[[], bool] = lambda: False) -> None:
    for seed in range(number):
        wire.time += 1e-3
        ranks.step(seed)
        if until():
            for more in range(3):  # the change is made, and what is unsent is sent before it
                ranks.step(more)
            return


def tuner_of(ranks: Ranks, rank: int = 0) -> Any:
    return dgcopt.gradients.synchronised.synchronised(ranks.optimizers[rank]).engine._tuner


def choices(ranks: Ranks) -> list[Candidate]:
    return [optimizer.compressor.choice for optimizer in ranks.optimizers]


def test_a_slow_link_gets_the_fastest_that_is_allowed(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.speed = 1e5
    with caplog.at_level(logging.INFO, "dgcopt"):
        ranks = Ranks(2, sgd(), compression="auto")
        assert choices(ranks) == [Candidate("NoCompression()", sizes=(25.0, 1.0))] * 2
        steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    (choice, other) = choices(ranks)
    assert choice == other and choice.base in ("QSGD()", "ByteGrad()"), "8 bits, but not selected coordinates"
    ranks.assert_replicas_equal()
    (line,) = [record.message for record in caplog.records if "dgcopt: auto" in record.message]
    assert f"uses {choice.name}, as " in line and "times as fast as NoCompression()" in line
    assert "0.8 Mbit/s" in line, line


def test_sparse_ones_are_chosen_where_they_are_allowed(wire: Wire) -> None:
    wire.speed = 1e4
    ranks = Ranks(2, sgd(0.9), compression=dgcopt.Auto(allow=("exact", "sparse")))
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert "DGC" in choices(ranks)[0].base
    steps(ranks, wire, 4)
    ranks.assert_replicas_equal()
    assert ranks.optimizers[0].residual_norm() > 0
    assert not any("momentum_buffer" in state for state in ranks.optimizers[0].state.values()), "DGC has taken it over"


def test_a_fast_link_stays_with_the_exchange_of_ddp(wire: Wire) -> None:
    wire.speed, wire.latency = 1e12, 1e-7
    ranks = Ranks(2, sgd(), compression="auto")
    steps(ranks, wire, 70, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert "uses NoCompression()" in ranks.optimizers[0].compressor.reason
    assert choices(ranks)[0] == Candidate("NoCompression()", sizes=(25.0, 1.0))


def test_a_link_is_measured_with_messages_as_large_as_those_sent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links hold small messages in a buffer, so that their seconds say nothing about the rate."""
    carry = wire.carry
    monkeypatch.setattr(
        *(wire, "carry"),
        lambda sent, size: carry(sent if sent.nbytes > 2**15 else AllReduce(torch.zeros(1)), size),
    )
    wire.speed, wire.latency = 2e6, 0.04
    ranks = Ranks(2, sgd(), model=layers, compression="auto")
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    seconds = tuner_of(ranks)._forecast.seconds
    assert seconds["QSGD(), during backward"] < seconds["NoCompression(), after backward"] - 0.3


def test_an_exchange_is_tried_if_dense_steps_are_slower_than_predicted(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes of a step take longer than the probe has found, as on a machine with other work."""
    names, carry = ("NoCompression()", "ByteGrad()"), wire.carry
    monkeypatch.setattr(auto, "CANDIDATES", {name: auto.CANDIDATES[name] for name in names})

    def contended(collective: Collective, size: int) -> None:
        wire.time += 0.1 if "vote" in collective.label else 0.0
        carry(collective, size)

    monkeypatch.setattr(wire, "carry", contended)
    wire.latency, wire.speed = 1e-3, 2e7
    ranks = Ranks(2, sgd(), compression="auto")
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert "ByteGrad()" in ranks.optimizers[0].compressor.reason


def test_no_probed_message_takes_much_of_a_step() -> None:
    recipe = record_recipe("", "", {"weight": (1000, 1000)}, dgcopt.NoCompression(), (2,), clock=lambda: 0.0)
    fast, slow = (probe_sizes([recipe], recipe, 2, watched) for watched in (0.1, 10.0))
    assert fast["AllReduce"] == [1024, 4_000_000, 64_000], "as large as those sent"
    assert slow["AllReduce"][:2] == [1024, 50_000], "an eighth of a second at 0.4 MB/s"
    assert fast["AllGather"][:2] == slow["AllGather"][:2] == [1024, 4096]


def test_few_are_tried_and_none_that_loses_by_the_model() -> None:
    predicted = {"plain": 1.0, "a": 0.5, "a, late": 0.55, "b": 0.7, "c": 0.76, "d": 1.2, "e": 1.05}
    groups = {name: name[0] for name in predicted}
    assert shortlist(predicted, groups, "plain", 0.0) == ["a", "b"]
    fast = {name: seconds for name, seconds in predicted.items() if name in ("plain", "d", "e")}
    assert shortlist(fast, groups, "plain", 0.0) == ["e"]
    assert shortlist(fast, groups, "plain", 1.15) == ["e", "d"]
    assert len(shortlist({**dict.fromkeys("abcde", 0.9), "plain": 1.0}, groups, "plain", 0.0)) == 3


def test_a_link_that_changes_while_exchanges_are_tried(wire: Wire) -> None:
    wire.speed = 1e5
    ranks = Ranks(2, sgd(), compression="auto")
    steps(ranks, wire, 60, lambda: len(tuner_of(ranks)._trials.turns) == 5)
    assert tuner_of(ranks)._trials.phase.value == "try"
    wire.speed, wire.latency = 1e12, 1e-7
    steps(ranks, wire, 60, lambda: "tried again" in ranks.optimizers[0].compressor.reason)
    assert "the link has changed while exchanges were tried" in ranks.optimizers[1].compressor.reason
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert "uses NoCompression()" in ranks.optimizers[0].compressor.reason
    ranks.assert_replicas_equal()


def test_a_link_that_drifts_is_measured_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "WINDOW", 4)
    wire.speed = 1e5
    ranks = Ranks(2, sgd(), compression="auto")
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    slow = choices(ranks)[0]
    assert slow.base != "NoCompression()"
    wire.speed, wire.latency = 1e12, 1e-7
    steps(ranks, wire, 40, lambda: "measured again" in ranks.optimizers[0].compressor.reason)
    assert f"with {slow.name}, and took" in ranks.optimizers[0].compressor.reason
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert choices(ranks) == [Candidate("NoCompression()", sizes=(25.0, 1.0))] * 2


def test_after_a_drift_only_the_steps_since_then_are_predicted_from(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward take longer from some step on, as for longer sequences."""
    monkeypatch.setattr(tuner, "WINDOW", 4)
    ranks = Ranks(2, sgd(), compression="auto")
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert tuner_of(ranks)._forecast.seconds[tuner_of(ranks)._trials.fallback] < 0.5
    for phase in ("measured again", "uses"):
        for step in range(60):
            wire.time += 0.5
            ranks.step(step)
            if phase in ranks.optimizers[0].compressor.reason:
                break
    assert tuner_of(ranks)._forecast.seconds[tuner_of(ranks)._trials.fallback] > 0.5


class Linear(nn.Module):
    """Parameters whose gradients are the inputs, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))
        self.vector = nn.Parameter(torch.zeros(17, dtype=torch.float64))


SCRIPT = {2: "DGC", 6: "QSGD()", 9: "DGC", 12: "owner", 15: "low rank", 18: "NoCompression()"}
"""Candidates by the step after which they are put in place."""


@pytest.mark.parametrize(
    ("momentum", "op", "maximize"), [(0.0, "average", False), (0.9, "average", False), (0.9, "sum", True)]
)
def test_nothing_unsent_is_lost_when_exchanges_change(
    monkeypatch: pytest.MonkeyPatch, momentum: float, op: str, maximize: bool
) -> None:
    """All weights end where dense training ends, and no rank's optimizer has other state than the others'."""
    kept = {"warmup": None, "momentum_masking": False}
    made = {
        "NoCompression()": ("delayed", dgcopt.NoCompression),
        "DGC": ("delayed", lambda: dgcopt.DGC(0.05, **kept)),
        "owner": ("delayed", lambda: dgcopt.DGC(0.05, reduce="owner", values="int8", **kept)),
        "QSGD()": ("delayed", lambda: dgcopt.ByteGrad(error_feedback=True)),
        "low rank": ("delayed", lambda: dgcopt.PowerSGD(start_step=0)),
    }
    monkeypatch.setattr(auto, "CANDIDATES", made)

    def scripted(self: AutoTuner, step: int) -> Generator[Collective, Tensor, Change | None]:
        yield from ()
        if step in SCRIPT:
            self._candidates["next"] = Candidate(SCRIPT[step])
            self._trials = Trials("next", "next")
            return self._change()
        return None

    monkeypatch.setattr(AutoTuner, "_stepped", scripted)
    make = functools.partial(SGD, lr=0.1, momentum=momentum, maximize=maximize)
    more = {"gradient_predivide_factor": 2.0} if op == "average" else {}
    ranks = Ranks(2, make, model=Linear, compression=dgcopt.Auto(allow=("delayed",)), op=op, **more)
    random, total, used, norms = torch.Generator().manual_seed(0), {}, [], []
    for step in range(300):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for name, param in model.named_parameters():
                given = torch.randn(param.shape, generator=random, dtype=torch.float64) * (step < 20)
                total[name] = total.get(name, 0) + given / 2
                loss = loss + (param * given).sum()
            loss.backward()
        for optimizer in ranks.optimizers:
            optimizer.step()
        ranks.assert_replicas_equal()
        used.append(ranks.optimizers[0].compressor.choice.base)
        norms.append(ranks.optimizers[0].residual_norm())
    assert [base for i, base in enumerate(used) if i == 0 or used[i - 1] != base] == [
        "NoCompression()",
        *SCRIPT.values(),
    ]
    assert norms[5] > 0 and norms[-1] == 0
    for name, param in ranks.models[0].named_parameters():
        expected = (0.1 if maximize else -0.1) * (2 if op == "sum" else 1) * total[name] / (1 - momentum)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-6)
    one, other = (optimizer.state for optimizer in ranks.optimizers)
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        for kind, tensor in mine.items():
            assert not isinstance(tensor, Tensor) or torch.equal(tensor, theirs[kind]), kind


def test_adam_is_not_given_exchanges_that_send_its_updates(wire: Wire) -> None:
    wire.speed = 1e4
    ranks = Ranks(2, lambda p: torch.optim.AdamW(p, lr=0.01), compression=dgcopt.Auto(("exact", "sparse")))
    names = {one.base for one in ranks.optimizers[0].compressor.candidates(False, False)}
    assert names == {"NoCompression()"}
    steps(ranks, wire, 40)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("make, expected", [(torch.optim.SGD, True), (torch.optim.AdamW, False)])
def test_one_bit_is_for_optimizers_that_do_not_scale_each_coordinate(make: Any, expected: bool) -> None:
    for chosen, offered in (
        (dgcopt.Auto(("exact", "delayed")), expected),
        (dgcopt.Auto(compressor=dgcopt.OneBit()), True),
    ):
        chosen.attach(make([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
        assert any(one.base.startswith("OneBit") for one in chosen.candidates(False, False)) == offered


@pytest.mark.parametrize("nodes, allowed", [(1, False), (2, True)])
def test_hierarchy_is_chosen_where_machines_have_several_ranks(wire: Wire, nodes: int, allowed: bool) -> None:
    wire.speed = 1e5
    ranks = Ranks(4, sgd(), nodes=nodes, compression=dgcopt.Auto(compressor=dgcopt.NoCompression()))
    steps(ranks, wire, 70, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert choices(ranks)[0].hierarchical == allowed, ranks.optimizers[0].compressor.reason


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 400), nn.Linear(400, 400), nn.Linear(400, 400), nn.Linear(400, 5)).double()


def test_buckets_of_one_compressor_are_tuned_and_trials_are_written(wire: Wire, tmp_path: Path) -> None:
    """A collective costs 5 ms whatever its size: one bucket is better than two."""
    wire.speed, wire.latency, path = 1e12, 5e-3, tmp_path / "trials.csv"
    compression = dgcopt.Auto(compressor=dgcopt.NoCompression(), trials=str(path))
    ranks = Ranks(2, sgd(), model=layers, compression=compression)
    steps(ranks, wire, 70, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    choice = choices(ranks)[0]
    assert choice.base == "NoCompression()" and choice.sizes in ((25.0, 25.0), (100.0, 100.0)), choice
    rows = list(csv.DictReader(path.open()))
    layouts = {(row["overlap"], row["bucket_mb"], row["first_bucket_mb"]) for row in rows}
    assert layouts == {("", "", ""), ("False", "", ""), ("True", "25.0", "25.0"), ("False", "25.0", "25.0")}, (
        "those that send the same buckets at the same time are one candidate"
    )
    (chosen,) = [row for row in rows if row["chosen"] == "True"]
    assert float(chosen["measured_seconds"]) < 0.95 * float(rows[0]["measured_seconds"])
    assert all(float(row["predicted_seconds"]) > 0 for row in rows)


def test_sizes_that_the_user_sets_are_not_tuned() -> None:
    compressor = dgcopt.Auto(compressor=dgcopt.NoCompression())
    assert {one.sizes for one in compressor.candidates(False, True)} == {None}
    assert len({one.sizes for one in compressor.candidates(False, False)}) > 3


@pytest.mark.parametrize(
    ("make", "compressor"),
    [
        (sgd(), dgcopt.DeMo()),
        (sgd(0.9), dgcopt.DGC.faithful()),
        (torch.optim.AdamW, dgcopt.OneBitAdam(2)),
        (torch.optim.AdamW, dgcopt.TopK(first_moment="residual")),
    ],
    ids=["DeMo", "DGC", "OneBitAdam", "TopK"],
)
def test_one_compressor_is_tuned_in_front_of_the_optimizer_that_it_needs(
    wire: Wire, make: Any, compressor: dgcopt.Compressor
) -> None:
    """Costs are recorded with an optimizer of that kind, and the length of an epoch is in the copy made at wrapping."""
    given = dgcopt.Auto(compressor=compressor)
    given.set_steps_per_epoch(10)
    ranks = Ranks(2, make, compression=given)
    steps(ranks, wire, 8)
    assert tuner_of(ranks)._forecast.seconds


def test_rules_for_parameters_of_the_model_that_are_not_trained_are_taken_in_trials() -> None:
    rules = dgcopt.PerParameter({"4.*": dgcopt.NoCompression(), "*": dgcopt.DGC(0.1)})
    model, comm = small_model(), dgcopt.simulated_world(2)[0]
    trained = [param for name, param in model.named_parameters() if name[0] != "4"]
    auto: Any = dgcopt.DistributedOptimizer(
        SGD(trained, lr=0.1), model.named_parameters(), dgcopt.Auto(compressor=rules), comm=comm
    ).compressor
    assert all(auto.make(candidate) for candidate in auto.candidates(False, False))


def test_trials_that_cannot_be_written_are_a_warning(
    wire: Wire, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire.speed = 1e5
    ranks = Ranks(2, sgd(), compression=dgcopt.Auto(trials=str(tmp_path / "none" / "trials.csv")))
    steps(ranks, wire, 60, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert "cannot write trials to" in caplog.text and "No such file" in caplog.text


def test_ranks_with_other_candidates_are_told() -> None:
    comms, models = dgcopt.simulated_world(2), [small_model() for _ in range(2)]
    allowed = (("exact", "rounded"), ("exact", "sparse"))
    optimizers = [
        dgcopt.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), model.named_parameters(), dgcopt.Auto(allow), comm=comm
        )
        for model, comm, allow in zip(models, comms, allowed, strict=True)
    ]
    for model in models:
        model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
    with pytest.raises(MismatchError, match=r"allow=\('exact', 'rounded'\)"):
        optimizers[0].step()


def test_a_single_rank_has_nothing_to_choose(wire: Wire) -> None:
    ranks = Ranks(1, sgd(), compression="auto")
    steps(ranks, wire, 30)
    assert choices(ranks) == [Candidate("NoCompression()", sizes=(25.0, 1.0))]
    assert ranks.optimizers[0].telemetry.sent_bytes == 0


def test_a_checkpoint_holds_the_choice(wire: Wire) -> None:
    wire.speed = 1e4
    before = Ranks(2, sgd(0.9), compression=dgcopt.Auto(("exact", "sparse")))
    steps(before, wire, 60, lambda: "uses" in before.optimizers[0].compressor.reason)
    steps(before, wire, 3)
    norm = before.optimizers[0].residual_norm()
    after = Ranks(2, sgd(0.9), compression=dgcopt.Auto(("exact", "sparse")))
    for one, other in zip(before.optimizers, after.optimizers, strict=True):
        other.load_state_dict(one.state_dict())
    for one, other in zip(before.models, after.models, strict=True):
        other.load_state_dict(one.state_dict())
    assert choices(after) == choices(before) and norm > 0
    assert after.optimizers[0].residual_norm() == norm
    for ranks in (before, after):
        steps(ranks, wire, 10)
    for ours, theirs in zip(before.weights(), after.weights(), strict=True):
        assert torch.equal(ours, theirs)
    assert tuner_of(after)._trials.phase.value == "keep", "nothing is tried anew"
    assert tuner_of(after)._trials.level == tuner_of(before)._trials.level
    other = Ranks(2, sgd(0.9), compression="auto")
    with pytest.raises(ConfigError, match=r"the choice DGC.* give the same allow and compressor"):
        other.optimizers[0].load_state_dict(before.optimizers[0].state_dict())


def test_it_is_refused_where_nothing_chooses() -> None:
    bucket = bucket_of([torch.zeros(4)])
    with pytest.raises(ConfigError, match="Auto chooses at the steps of DistributedOptimizer"):
        next(iter(dgcopt.Auto().exchange(bucket.empty(), context_of(bucket, 0, 2))))
    for allow in ((), ("exact", "lossy"), "exact"):
        with pytest.raises(ConfigError, match=r"allow must hold some of 'exact', 'rounded'"):
            dgcopt.Auto(allow)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compressor must be a dgcopt.Compressor"):
        dgcopt.Auto(compressor=dgcopt.Auto())
    with pytest.raises(ConfigError, match="would enter the state of a DDP hook"):
        dgcopt.Auto(compressor=dgcopt.BF16(dgcopt.from_ddp_hook({}, lambda state, bucket: bucket.buffer())))
    dgcopt.Auto(compressor=dgcopt.from_ddp_hook(None, lambda state, bucket: bucket.buffer()))


def test_large_models_are_recorded_at_a_fraction_of_their_sizes() -> None:
    shapes = {"big": (1000, 300), "small": (7, 3), "bias": (1000,)}
    shrunk, factor = shrink(shapes, 30_000)
    assert shrunk["bias"] == (1000,) and shrunk["big"][1] == 300
    numel = sum(torch.Size(shape).numel() for shape in shrunk.values())
    assert numel < 33_000 and factor * numel == pytest.approx(301_021)
    assert shrink(shapes, 400_000) == (shapes, 1.0)
    recipe = record_recipe("", "", shrunk, dgcopt.NoCompression(), (2,), clock=lambda: 0.0)
    (place,) = grow(recipe, factor).low.rounds
    assert sum(one.nbytes for one in place) == pytest.approx(4 * 301_021, rel=0.01)


def test_machines_of_unlike_size_have_no_hierarchy(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the second of three machines took theirs for the size of all, as 3 times 2 are 6."""
    simulated = dgcopt.simulated_world

    def unlike(size: int, nodes: int) -> Any:
        comms = simulated(size, nodes)
        for comm in comms:
            comm._set_nodes([0, 1, 1, 2, 2, 2])
        return comms

    monkeypatch.setattr(dgcopt, "simulated_world", unlike)
    wire.speed = 1e5
    ranks = Ranks(6, sgd(), compression=dgcopt.Auto(compressor=dgcopt.NoCompression()))
    steps(ranks, wire, 70, lambda: "uses" in ranks.optimizers[0].compressor.reason)
    assert not any(one.hierarchical for one in choices(ranks)), ranks.optimizers[0].compressor.reason
