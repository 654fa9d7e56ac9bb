"""Every algorithm on real ranks does what it does on simulated ones, and LocalSGD what torch's averager does."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import Comm, LocalSGD
from tests.support.wires import only

from ..training import assert_close, assert_same_on_all_ranks, batch, make_model
from .member import ADAM, AVERAGED, MOMENTUM, PLAIN, STEPS, Member, gathered, train


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
