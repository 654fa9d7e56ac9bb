"""Gradients that are changed outside of dgcopt, on all ranks or on some."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import MismatchError
from tests.support.worlds import MakeOptimizer, Ranks, momentum_sgd, small_batch


def clip(ranks: Ranks, on: list[int]) -> None:
    for rank in on:
        nn.utils.clip_grad_norm_(ranks.models[rank].parameters(), 0.01)


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.5)])
def test_averaged_gradients_that_one_rank_clips(compression: Any) -> None:
    """Weights have come apart by then: told at the next step, on all ranks, with the rank."""
    for on, by_hand in (([0, 1, 2], [0, 1, 2]), ([1], [0, 1, 2]), ([1], [1])):
        ranks = Ranks(3, momentum_sgd, compression=compression)
        for seed in range(3):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            if seed == 2 and len(on) == 1:
                for optimizer in ranks.optimizers:
                    with pytest.raises(
                        MismatchError, match=r"rank\(s\) \[1\] changed the averaged gradients of step 1"
                    ):
                        optimizer.step()
                break
            for rank in by_hand:
                ranks.optimizers[rank].synchronize()
            if seed:
                clip(ranks, on)
            for rank, optimizer in enumerate(ranks.optimizers):
                with optimizer.skip_synchronize() if rank in by_hand else contextlib.nullcontext():
                    optimizer.step()


def test_a_rank_that_clips_by_its_optimizer_alone() -> None:
    ranks = Ranks(2, momentum_sgd)
    ranks.backward()
    ranks.optimizers[0].clip_grad_norm_(0.01)
    for optimizer in ranks.optimizers:
        optimizer.step()
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank\(s\) \[0\] changed the averaged gradients of step 0"):
        ranks.optimizers[0].step()


def test_gradients_of_a_step_that_no_rank_takes_are_not_clipped() -> None:
    """Each rank's are its own then, and those of an embedding are sparse, whose norm torch does not compute."""
    tables = [nn.Embedding(3, 2, sparse=True) for _ in range(2)]
    optimizers = [
        dgcopt.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), comm=comm, sparse_as_dense=True
        )
        for table, comm in zip(tables, dgcopt.simulated_world(2), strict=True)
    ]
    for factor, table in zip((1.0, torch.nan), tables, strict=True):
        table.weight.data.fill_(1.0)
        table(torch.tensor([1])).sum().mul(factor).backward()
    for optimizer in optimizers:
        assert optimizer.clip_grad_norm_(1.0).isnan()
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.step()
    assert all((table.weight == 1.0).all() for table in tables)


def test_gradients_in_the_buckets_of_ddp_are_refused(tmp_path: Path) -> None:
    """They would point to the first results, past the buckets from which DDP takes the next ones."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for is_view in (True, False):  # the views' modules are alive when others train
            ranks = Ranks(2, momentum_sgd)
            modules = [
                nn.parallel.DistributedDataParallel(each, gradient_as_bucket_view=is_view) for each in ranks.models
            ]
            inputs, targets = small_batch()
            for module in modules:
                nn.functional.cross_entropy(module(inputs), targets).backward()
            with pytest.raises(dgcopt.ConfigError, match="not into DDP's") if is_view else contextlib.nullcontext():
                for optimizer in ranks.optimizers:
                    optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_of_one_element_have_any_stride() -> None:
    """That of a real part is every second float; a copy of its bits is kept to tell a later change."""
    models = [nn.ParameterDict({"real": torch.ones(1), "imag": torch.ones(1)}) for _ in range(2)]
    optimizers = [
        dgcopt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), dgcopt.TopK(0.5), comm=comm
        )
        for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
    ]
    for _ in range(3):
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.zero_grad()
            torch.complex(model["real"], model["imag"]).mul(2 + 1j).real.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        torch.testing.assert_close(model["real"].detach(), torch.tensor([0.4]))
        torch.testing.assert_close(model["imag"].detach(), torch.tensor([1.3]))


def test_launched_exchanges_are_cancelled_on_all_ranks_before_they_are_told() -> None:
    ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.5, overlap=True))
    ranks.step(0)
    ranks.backward()
    ranks.optimizers[0].clip_grad_norm_(0.01)
    for optimizer in ranks.optimizers:
        optimizer.step()
    before = [optimizer.telemetry.repeated for optimizer in ranks.optimizers]
    ranks.backward()
    for optimizer, repeated in zip(ranks.optimizers, before, strict=True):
        with pytest.raises(MismatchError, match=r"rank\(s\) \[0\] changed the averaged gradients of step 1"):
            optimizer.step()
        assert optimizer.telemetry.repeated == repeated + 1
    ranks.step(1)  # told once


def test_averaged_gradients_that_one_rank_clips_are_mended() -> None:
    ranks = Ranks(2, momentum_sgd, on_divergence="resync")
    for seed in range(3):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        clip(ranks, [1] if seed == 0 else [])
        for optimizer in ranks.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        assert all(map(torch.equal, ranks.weights(0), ranks.weights(1))) == (seed > 0)


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.5), dgcopt.DGC(0.5)])
def test_own_gradients_that_one_rank_changes(compression: Any, caplog: pytest.LogCaptureFixture) -> None:
    """May be meant, as of a clip that depends on the norm: said once, and only if others with gradients have not."""
    ranks = Ranks(3, momentum_sgd, compression=compression)
    for on in ([], [0, 1, 2], [], [1], [1, 2]):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward()
        clip(ranks, on)
        for optimizer in ranks.optimizers:
            optimizer.step()
        told = [record.getMessage() for record in caplog.records if "changed their gradients" in record.getMessage()]
        assert len(told) == (3 if on in ([1], [1, 2]) else 0)
        ranks.assert_replicas_equal()
    assert "step 3: rank(s) [1] changed their gradients between backward() and the exchange" in told[0]


def test_a_gradient_that_one_rank_does_not_have_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, momentum_sgd)
    ranks.step(0)
    for optimizer, model in zip(ranks.optimizers, ranks.models, strict=True):
        optimizer.zero_grad()
        layers = model if optimizer is ranks.optimizers[0] else model[:4]  # the last layer's gradient comes first
        layers(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert "changed their gradients" not in caplog.text


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_inf_makes_a_step_void_though_a_clip_by_value_would_make_it_finite(ratio: float) -> None:
    """Whenever its bucket leaves."""
    ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(ratio, clip=dgcopt.LocalClip(value=0.5), overlap=True))
    for seed in range(2):
        ranks.step(seed)
    before = ranks.weights()
    hook = ranks.models[0][2].weight.register_hook(lambda grad: grad.fill_(torch.inf))
    ranks.step()
    hook.remove()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]
    assert all(map(torch.equal, ranks.weights(), before))


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.5), dgcopt.PowerSGD(start_step=0)])
@pytest.mark.parametrize("make", [momentum_sgd, torch.optim.Adam])
def test_one_tensor_as_the_gradient_of_two_layers(make: MakeOptimizer, compression: Any) -> None:
    """Set by hand on one rank, such as zeros for layers without data: each layer gets its own mean over ranks."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(2))

    def trained(shared: bool) -> Ranks:
        ranks = Ranks(2, make, layers, compression=compression)
        for step in range(3):
            for rank, model in enumerate(ranks.models):
                first, second = (layer.weight for layer in model)
                (first.cos().sum() + (rank + step + 1) * second.square().sum()).backward()
                if rank == 0:
                    first.grad = second.grad if shared else second.grad.clone()
            for optimizer in ranks.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ranks.assert_replicas_equal()
        return ranks

    for mine, other in zip(trained(True).weights(), trained(False).weights(), strict=True):
        assert torch.equal(mine, other)
