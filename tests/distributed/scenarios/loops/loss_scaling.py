"""Steps without finite gradients, with and without a GradScaler."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import DGC, Comm, Warmup
from dgcopt.collectives import AllReduce, Exchange
from tests.support.wires import share

from ..training import assert_close, batch, fingerprint, make_model, memory_of, tensors_in
from .pair import ADAM, SGD, Loop, Pair, wrap


class Halves(dgcopt.Compressor):
    """Sends half of gradient plus residual, and updates its residual in place, as a user's compressor may."""

    def exchange(self, grad: Tensor, ctx: dgcopt.Context) -> Exchange:
        residual = ctx.memory.remember("residual", grad).add_(grad)
        grad.copy_(residual).mul_(0.5)
        residual.sub_(grad)
        return (yield AllReduce(grad, op=ctx.op))


def rounding(comm: Comm, real: float) -> float:
    """How far two runs of the same steps may differ: libraries add up in another order from one time to the next."""
    return 0.0 if comm.takes_turns else real


def bits_of(model: nn.Module, optimizer: Any) -> str:
    """Parameters, the optimizer's state, residuals, and the position in schedules."""
    state = optimizer.state_dict()
    kept = state.get("dgcopt", {"memory": {}, "step": 0})
    memory = {kind: dict(sorted(by_name.items())) for kind, by_name in sorted(kept["memory"].items())}
    step = torch.tensor(kept["step"])
    return fingerprint([*model.parameters(), *tensors_in(state["state"]), *tensors_in(memory), step])


def a_step_without_finite_gradients(comm: Comm) -> Loop:
    """NaN or Inf in one number on one rank: nobody takes the step, nothing is remembered of it."""
    makers: dict[str, Any] = {"SGD": SGD, "damped": functools.partial(SGD, weight_decay=0, dampening=0.2), "Adam": ADAM}
    warmup = Warmup(ratios=(0.5, 0.2), steps=2)
    compressions = (
        None,
        DGC(0.1, overlap=True, warmup=warmup),
        DGC(1.0, overlap=True, vectors="sparse"),
        Halves(),
    )
    for (name, make), compression in share(comm, itertools.product(makers.items(), compressions)):
        bad = [0, 4, 5]  # the very first step, and two in a row, once buckets leave early
        disturbed, calm = (Pair(comm, make, compression) for _ in range(2))
        for step in range(8):
            before = bits_of(disturbed.models[1], disturbed.ours)
            for pair in (disturbed, calm):
                if pair is calm and step in bad:
                    continue
                pair.ours.zero_grad()
                pair.loss(1, step).backward()
                if step in bad and comm.rank == comm.size - 1:
                    grad = pair.models[1][2].weight.grad
                    assert grad is not None
                    grad[1, 2] = (torch.nan, torch.inf)[step % 2]
                yield
                pair.ours.step()
                yield
            if step in bad:
                after = bits_of(disturbed.models[1], disturbed.ours)
                assert step == 0 or after == before, f"{name}: a skipped step left something behind"
        what = f"{name}, {compression}, steps {bad}"
        assert_close(
            list(disturbed.models[1].parameters()),
            list(calm.models[1].parameters()),
            rounding(comm, 1e-9),
            what,
        )
        if compression is not None:
            ours, theirs = (memory_of(pair.ours) for pair in (disturbed, calm))
            assert {k: sorted(v) for k, v in ours.items()} == {k: sorted(v) for k, v in theirs.items()}
            for kind, by_name in ours.items():
                values = [theirs[kind][name] for name in by_name]
                assert_close(list(by_name.values()), values, rounding(comm, 1e-9), f"{what}: {kind}")
        assert disturbed.ours.telemetry.skipped == len(bad) and disturbed.ours.telemetry.repeated == 0


def loss_scaling(comm: Comm) -> Loop:
    """The loop of torch's documentation, unmodified, with an overflow on one rank: skipped and rescaled on all.

    Also where no gradient arrives before the step: by passes in `no_sync` only, or set by hand and never to zero.
    """
    compressions = (None, DGC(0.1, overlap=True, warmup=Warmup(ratios=(0.5, 0.2), steps=2)))
    unseen = () if comm.takes_turns else ("in no_sync", "by hand", "by hand, unscale_")
    ways = ("as documented", *unseen, "unscale_", "unscale_ and clip_grad_norm_")
    for way, compression in share(comm, itertools.product(ways, compressions)):
        runs = []
        for overflow in (True, False):
            model = make_model(torch.float32)
            optimizer = wrap(SGD(model.parameters()), model, comm, compression)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
            for step in range(7):
                bad = step in (2, 3, 5)
                if bad and not overflow:
                    continue
                before = bits_of(model, optimizer)
                if "by hand" not in way:
                    optimizer.zero_grad()
                x, y = batch(step, 0, comm, torch.float32)
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)
                loss = mse_loss(output.float(), y)
                if bad and comm.rank == comm.size - 1:
                    loss = loss * torch.inf
                if "by hand" in way:
                    params = list(model.parameters())
                    for param, grad in zip(params, torch.autograd.grad(scaler.scale(loss), params), strict=True):
                        param.grad = grad
                else:
                    with optimizer.no_sync() if way == "in no_sync" else nullcontext():
                        scaler.scale(loss).backward()
                if "unscale_" in way or comm.takes_turns:
                    scaler.unscale_(optimizer)
                    yield
                if "clip" in way:
                    optimizer.clip_grad_norm_(1e6)
                    yield
                scaler.step(optimizer)
                scaler.update()
                yield
                assert not bad or bits_of(model, optimizer) == before, "a skipped step left something behind"
            assert optimizer.telemetry.steps == 4
            runs.append((model, optimizer, scaler.get_scale()))
        (disturbed, _, scale), (calm, _, calm_scale) = runs
        # scaling by powers of two changes no bits, so skipping must not either
        assert_close(
            list(disturbed.parameters()), list(calm.parameters()), rounding(comm, 1e-4), f"loss scaling, {way}"
        )
        assert calm_scale == 256.0
        assert scale == 32.0, f"rank {comm.rank} did not hear of the others' overflow: {scale}"
