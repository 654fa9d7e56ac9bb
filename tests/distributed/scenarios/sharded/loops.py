"""Training loops: overlap, accumulation, mixed precision, clipping, unused layers, empty shards, skipped steps."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt import DGC, Comm, NoCompression
from dgcopt.collectives import AllReduce

from .setup import (
    TOLERANCE,
    Wide,
    assert_close,
    batch,
    local_of,
    loss_of,
    memory_of,
    mesh_of,
    same_memory,
    scenarios_of,
    sharded,
    started_by,
    whole,
    wrap,
)


def leaves_during_backward(comm: Comm) -> None:
    """From the second step on, all buckets have launched when backward returns, the last layer's first."""
    mesh = mesh_of(comm, 2)
    for compressor in (NoCompression(), DGC(0.1, overlap=True)):
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, compressor)
        for step in range(3):
            before_last = list[int]()
            with started_by(optimizer) as started:
                handle = model[0].weight.register_post_accumulate_grad_hook(
                    lambda _, seen=before_last, told=started: seen.append(len(told))
                )
                loss_of(model, comm, step).backward()
                during = list(started)
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
            if step:
                assert during == started, f"{set(started) - set(during)} waited for the end of backward"
                assert before_last[0] > 0, "nothing left before the first layer's gradient was there"
                assert "(4." in during[0] or "(2." in during[0], f"the last layer should go first: {during}"


def as_fsdp_accumulates(comm: Comm) -> None:
    """Accumulation equals native HSDP's: reduced at the end, reduced in each pass, and by dgcopt's no_sync."""
    mesh = mesh_of(comm, 2)
    for how in ("reduced at the end", "reduced each time", "no_sync"):
        native, model = sharded(mesh), sharded(mesh["shard"])
        theirs, ours = SGD(native.parameters(), lr=0.05), wrap(model, SGD(model.parameters(), lr=0.05), mesh, DGC(1.0))
        for step in range(4):
            for one, m in ((theirs, native), (ours, model)):
                one.zero_grad(set_to_none=step % 2 == 0)
                for micro in range(3):
                    if how == "reduced at the end":
                        m.set_requires_gradient_sync(micro == 2)
                    outside = how != "no_sync" or micro == 2 or one is theirs
                    with nullcontext() if outside else one.no_sync():
                        loss_of(m, comm, 3 * step + micro).backward()
                one.step()
        assert_close(whole(model), whole(native), TOLERANCE, how)


def in_mixed_precision(comm: Comm) -> None:
    """bfloat16 weights in forward, float32 sums, gradients clipped over shards and replicas: equal to native HSDP."""
    mesh = mesh_of(comm, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    native, model = sharded(mesh, mp_policy=policy), sharded(mesh["shard"], mp_policy=policy)
    theirs = AdamW(native.parameters(), lr=0.01, eps=1e-3)
    ours = wrap(model, AdamW(model.parameters(), lr=0.01, eps=1e-3), mesh)
    for step in range(10):
        x, y = batch(step, comm.rank)
        norms = []
        for one, m in ((theirs, native), (ours, model)):
            one.zero_grad()
            nn.functional.mse_loss(m(x.bfloat16()).float(), y).backward()
            if one is ours:
                norms.append(one.clip_grad_norm_(0.1))
            else:
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1).full_tensor())  # type: ignore[attr-defined]
            one.step()
        assert norms[0] > 0.1 and abs(norms[0] / norms[1] - 1) < 1e-4, f"step {step}: {norms}"
    assert_close(whole(model), whole(native), 1e-4, "in bfloat16")


def unused_in_one_replica(comm: Comm) -> None:
    """A layer unused in one replica counts as zero there; its gradient is half of the other's."""
    mesh = mesh_of(comm, 2)
    model = sharded(mesh["shard"])
    optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, DGC(1.0))
    for step in range(3):
        optimizer.zero_grad()
        before = whole(model)
        uses = step == 1 and comm.rank < comm.size // 2
        loss_of(model, comm, step, extra=uses).backward()
        mine = model.extra.weight.grad
        assert (mine is not None) == uses
        wanted = None if mine is None else mine.full_tensor().clone()
        optimizer.step()
        moved = before["extra.weight"] - whole(model)["extra.weight"]
        assert bool(moved.any()) == (step == 1)
        if wanted is not None:
            torch.testing.assert_close(moved, 0.1 * wanted / 2)


def a_rank_without_elements(comm: Comm) -> None:
    """The only row is on the first rank of each replica; the others join votes and norms, and none hangs."""
    mesh = mesh_of(comm, 2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = sharded(mesh["shard"], nn.Sequential(nn.Linear(6, 1, bias=False)))
    max_norm, lr = 0.01, 0.1
    clip = dgcopt.LocalClip(max_norm)
    optimizer = wrap(model, SGD(model.parameters(), lr=lr), mesh, DGC(1.0, source="gradient", clip=clip))
    for step in range(3):
        before = whole(model)["0.weight"]
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        own = model[0].weight.grad.full_tensor()
        clipped = own * min(1.0, clip.local_threshold(2, "average") / float(own.norm()))
        mean = comm.run(AllReduce(clipped.clone(), label="of all ranks"))
        optimizer.step()
        torch.testing.assert_close(whole(model)["0.weight"], before - lr * mean)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, comm, 3)
        loss.backward()
        return loss.detach()

    wanted = comm.run(AllReduce(loss_of(model, comm, 3).detach().double(), label="loss of all ranks"))
    assert abs(float(optimizer.step(closure)) - float(wanted)) < 1e-6, "the mean over all ranks"


def skipped_everywhere(comm: Comm) -> None:
    """NaN in one rank's shard: no rank steps, no memory changes, every loss scale falls; the next step is taken."""
    mesh = mesh_of(comm, 2)
    momentum, adamw = functools.partial(SGD, lr=0.01, momentum=0.9), functools.partial(AdamW, lr=0.01)
    for compressor, make, scales in (
        (DGC(0.3), momentum, False),
        (DGC(0.3, overlap=True), momentum, False),
        (dgcopt.TopK(0.3), adamw, False),
        (DGC(0.3), momentum, True),
        (dgcopt.TopK(0.3), adamw, True),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, make(model.parameters()), mesh, compressor)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, comm, step)).backward()
            if step == 2 and comm.rank == comm.size - 1:
                local_of(model[2].weight.grad)[0] = torch.nan
            before = whole(model), memory_of(optimizer)
            scaler.step(optimizer)
            scaler.update()
            after = whole(model), memory_of(optimizer)
            same = [torch.equal(before[0][name], tensor) for name, tensor in after[0].items()]
            assert all(same) if step == 2 else not any(same), f"rank {comm.rank}, step {step}: {same}"
            assert same_memory(before[1], after[1]) == (step == 2), f"rank {comm.rank}, step {step}"
        assert optimizer.telemetry.skipped == 1
        assert scaler.get_scale() == (4.0 if scales else 1.0)


def void_when_it_arrives(comm: Comm) -> None:
    """Momentum that overflows in one shard is found after the exchange; ranks of other shards abort the step too."""
    mesh = mesh_of(comm, 2)
    model = sharded(mesh["shard"], Wide())
    is_large = False

    def enlarge(param: Tensor) -> None:  # before the gradient leaves, so that it leaves once
        if is_large:
            local_of(param.grad).fill_(3e38)  # twice as large a momentum in the next step is infinite

    model[2].weight.register_post_accumulate_grad_hook(enlarge)
    optimizer = wrap(model, SGD(model.parameters(), lr=0.0, momentum=0.9), mesh, DGC(0.3, overlap=True))
    for step in range(4):
        optimizer.zero_grad()
        is_large = step > 1 and comm.rank % 2 == 1
        loss_of(model, comm, step).backward()
        before = memory_of(optimizer)
        optimizer.step()
        assert same_memory(before, memory_of(optimizer)) == (step == 3), f"rank {comm.rank}, step {step}"
    assert optimizer.telemetry.skipped == 1


SCENARIOS = scenarios_of(
    leaves_during_backward,
    skipped_everywhere,
    void_when_it_arrives,
    a_rank_without_elements,
    as_fsdp_accumulates,
    in_mixed_precision,
    unused_in_one_replica,
)
