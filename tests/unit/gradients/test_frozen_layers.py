"""Frozen layers: with a gradient of earlier steps, frozen except during backward, and on ranks without data."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.gradients.synchronised import steps_of
from tests.support.worlds import Ranks, momentum_sgd, same, small_batch, small_model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


UPDATES: dict[str, dict[str, Any]] = {
    "TopK": {"compression": dgcopt.TopK(0.1)},
    "DGC": {"compression": dgcopt.DGC(0.1)},
    "TopK without the first moment": {"compression": dgcopt.TopK(0.1, first_moment="residual")},
    "by name": {"compression": dgcopt.PerParameter({"0.*": dgcopt.TopK(0.1), "*": dgcopt.DGC(0.2)})},
    "Adasum": {"op": "adasum"},
}
GRADIENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "DGC of gradients": {"compression": dgcopt.DGC(0.1, source="gradient")},
}


def bits_of(models: list[nn.Module]) -> list[list[torch.Tensor]]:
    return [[param.detach().clone() for param in model[0].parameters()] for model in models]


@pytest.mark.parametrize("keeps", ["zeros", "the last one"])
@pytest.mark.parametrize("settings", [*UPDATES.values(), *GRADIENTS.values()], ids=[*UPDATES, *GRADIENTS])
def test_a_frozen_layer_that_keeps_its_gradient_stays_equal_on_all_ranks(settings: dict[str, Any], keeps: str) -> None:
    """The optimizer steps it; where updates travel it stays, and its gradient counts in no norm."""
    ranks = Ranks(2, adamw, **settings)
    for seed in range(12):
        is_frozen = 4 <= seed < 8
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            model[0].requires_grad_(not is_frozen)
            if keeps == "zeros":
                optimizer.zero_grad(set_to_none=False)
        ranks.backward(seed)
        before = bits_of(ranks.models)
        for optimizer in ranks.optimizers:
            if seed % 2:
                optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
        ranks.assert_replicas_equal()
        stays = same(before, bits_of(ranks.models))
        assert stays == (is_frozen and settings in UPDATES.values()), "updates move what they travel for"


def test_a_dense_frozen_layer_that_keeps_its_gradient_is_stepped_as_in_one_process() -> None:
    ranks, whole = Ranks(2, adamw), small_model()
    bare = adamw(whole.parameters())
    for seed in range(6):
        for model, optimizer in zip([*ranks.models, whole], [*ranks.optimizers, bare], strict=True):
            model[0].requires_grad_(seed < 3)
            optimizer.zero_grad(set_to_none=False)
        inputs, targets = small_batch(seed=seed)
        nn.functional.cross_entropy(whole(inputs), targets).backward()
        ranks.backward(seed)
        for optimizer in (*ranks.optimizers, bare):
            optimizer.step()
    ranks.assert_replicas_equal()
    for ours, theirs in zip(ranks.weights(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("settings", [*UPDATES.values(), *GRADIENTS.values()], ids=[*UPDATES, *GRADIENTS])
def test_the_gradient_of_a_skipped_step_is_not_used_once_its_layer_is_frozen(
    settings: dict[str, Any], scaled: bool
) -> None:
    """It is each rank's own; another layer's gradient is set to None without zero_grad()."""
    ranks = Ranks(2, adamw, **settings)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled) for _ in range(2)]
    ranks.step()
    weights = ranks.weights()
    for seed in range(1, 4):
        for model in ranks.models:
            model[2].requires_grad_(seed == 1)
            for layer in (model[0], model[4]):
                layer.zero_grad()
        ranks.backward(seed)
        if seed == 1:
            ranks.models[1][0].weight.grad[0, 0] = torch.nan
        before = ranks.weights()[2:4]
        for scaler, optimizer in zip(scalers, ranks.optimizers, strict=True):
            scaler.scale(torch.ones(1))
            scaler.unscale_(optimizer)
        for scaler, optimizer in zip(scalers, ranks.optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        ranks.assert_replicas_equal()
        assert same(before, ranks.weights()[2:4])
    assert not same(weights, ranks.weights())
    assert ranks.optimizers[0].telemetry.skipped == 1


@pytest.mark.parametrize("settings", [*UPDATES.values(), *GRADIENTS.values()], ids=[*UPDATES, *GRADIENTS])
def test_a_layer_that_is_frozen_but_during_backward_is_exchanged(settings: dict[str, Any]) -> None:
    """Also one that was frozen when the optimizer was wrapped."""

    def frozen() -> nn.Module:
        model = small_model()
        model[0].requires_grad_(False)
        return model

    ranks = Ranks(2, adamw, frozen, **settings)
    assert not any(param.requires_grad for model in ranks.models for param in model[0].parameters())
    for seed in range(6):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            optimizer.zero_grad()
            model[0].requires_grad_(seed >= 2)
        ranks.backward(seed)
        before = bits_of(ranks.models)
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            model[0].requires_grad_(False)
            optimizer.step()
        ranks.assert_replicas_equal()
        assert same(before, bits_of(ranks.models)) == (seed < 2)


@pytest.mark.parametrize("is_sent", [True, False], ids=["backward", "no_sync"])
def test_a_layer_that_is_frozen_after_backward_is_exchanged_by_a_step_that_is_repeated(is_sent: bool) -> None:
    """Its gradient would otherwise be taken for one of an earlier step, equal on all ranks."""
    ranks = Ranks(2, adamw)
    ranks.step()
    with ExitStack() as blocks:
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
            blocks.enter_context(nullcontext() if is_sent else optimizer.no_sync())
        ranks.backward(1)
    for model in ranks.models:
        model[0].requires_grad_(False)
    with patch("dgcopt.gradients.outgoing.OutgoingBuckets.launch_rest", side_effect=MemoryError):
        for optimizer in ranks.optimizers:
            steps_of(optimizer).engine.expect_step()
        for optimizer in ranks.optimizers:
            with pytest.raises(MemoryError):
                optimizer.step()
    for optimizer in ranks.optimizers:
        steps_of(optimizer).engine.expect_step()
    for optimizer in ranks.optimizers:
        optimizer.step()
    ranks.assert_replicas_equal()


def test_a_layer_that_is_frozen_after_backward_and_idle_on_some_ranks_is_named() -> None:
    ranks = Ranks(2, adamw)
    ranks.step()
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.models[0](small_batch()[0]).sum().backward()
    ranks.models[1][2:](torch.ones(1, 30, dtype=torch.float64)).sum().backward()
    for model in ranks.models:
        model[0].requires_grad_(False)
    words = r"parameter 0\.weight.*, frozen\]\. Freeze parameters on all ranks alike, before backward\(\) or after step"
    for optimizer in ranks.optimizers:
        with pytest.raises(dgcopt.MismatchError, match=words):
            optimizer.step()


@pytest.mark.parametrize("make", [momentum_sgd, adamw])
@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.1)], ids=repr)
def test_a_rank_without_data_steps_frozen_layers_that_keep_their_gradient(make: Any, compression: Any) -> None:
    ranks = Ranks(2, make, compression=compression)

    def backward(rank: int, seed: int) -> None:
        ranks.optimizers[rank].zero_grad(set_to_none=False)
        inputs, targets = small_batch(seed=seed)
        nn.functional.cross_entropy(ranks.models[rank](inputs[rank::2]), targets[rank::2]).backward()

    with dgcopt.join(ranks.optimizers[0]):
        with dgcopt.join(ranks.optimizers[1]):
            for seed in range(4):
                for rank in range(2):
                    ranks.models[rank][0].requires_grad_(seed < 2)
                    backward(rank, seed)
                for optimizer in ranks.optimizers:
                    optimizer.step()
        for seed in range(4, 8):
            backward(0, seed)
            ranks.optimizers[0].step()
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("compressor", [dgcopt.DGC(1.0), dgcopt.CSC(1.0, chunk=64, warmup=None)], ids=["DGC", "CSC"])
@pytest.mark.parametrize("fails", [False, True])
def test_momentum_is_taken_over_of_a_layer_that_is_unfrozen_beside_others(
    compressor: dgcopt.Compressor, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD has stepped before it was wrapped; its buffer waits until a step with the layer succeeds."""

    def trained(compression: dgcopt.Compressor) -> list[torch.Tensor]:
        generator, ranks = torch.Generator().manual_seed(0), []
        for comm in dgcopt.simulated_world(2):
            params = [torch.nn.Parameter(torch.zeros(70)) for _ in range(2)]
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            for param in params:
                param.grad = torch.ones(70)
            optimizer.step()
            params[1].requires_grad = False
            named = [(f"p{place}", param) for place, param in enumerate(params)]
            ranks.append((params, dgcopt.DistributedOptimizer(optimizer, named, compression, comm=comm)))
        for step in range(5):
            grad = torch.randn(70, generator=generator)
            for fails_now in (True, False) if fails and step == 2 else (False,):
                for params, optimizer in ranks:
                    params[1].requires_grad = step >= 2
                    optimizer.zero_grad()
                    sum((param * grad).sum() for param in params if param.requires_grad).backward()
                with monkeypatch.context() as patch:
                    if fails_now:
                        patch.setattr("dgcopt.gradients.outgoing.exchange_of", Mock(side_effect=MemoryError))
                    for _, optimizer in ranks:
                        with pytest.raises(MemoryError) if fails_now else nullcontext():
                            optimizer.step()
                for _, optimizer in ranks:
                    optimizer.load_state_dict(optimizer.state_dict())
        return ranks[0][0]

    for ours, theirs in zip(trained(compressor), trained(dgcopt.NoCompression()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
