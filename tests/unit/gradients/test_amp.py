"""Loss scaling: an overflow on one rank skips the step on all, and no gradient is averaged while it is scaled."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding
from torch.optim import SGD

import dgcopt
from tests.support.worlds import Ranks, small_batch


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("compressor", [None, dgcopt.DGC(0.1, overlap=True)], ids=["dense", "DGC"])
def test_gradients_that_were_sent_before_they_were_unscaled_are_sent_again(
    compressor: dgcopt.Compressor | None, clips: bool
) -> None:
    """In a run whose first steps are not scaled, so that gradients leave during backward. torch does not count
    unscaling as a change of a gradient."""

    def train(enabled: bool) -> Ranks:
        ranks = Ranks(2, lambda params: SGD(params, lr=0.05), compression=compressor)
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled) for _ in ranks.models]
        ranks.step(0)
        for seed in (1, 2):
            inputs, targets = small_batch(seed=seed)
            for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs[rank::2]), targets[rank::2])
                scalers[rank].scale(loss).backward()
            for scaler, optimizer in zip(scalers, ranks.optimizers, strict=True):
                scaler.unscale_(optimizer)
            for optimizer in ranks.optimizers if clips else ():
                optimizer.clip_grad_norm_(1e6)
            for scaler, optimizer in zip(scalers, ranks.optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
            ranks.assert_replicas_equal()
        return ranks

    assert all(map(torch.equal, train(True).weights(), train(False).weights()))


def test_gradients_that_begin_with_zeros_are_sent_again_too() -> None:
    ranks = Ranks(2, lambda params: SGD(params, lr=1.0), lambda: nn.utils.skip_init(nn.Linear, 200, 1, bias=False))
    inputs = torch.ones(1, 200).index_fill_(1, torch.arange(100), 0.0)
    for model in ranks.models:
        model.weight.data.zero_()
    for enabled in (False, True):
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled) for _ in ranks.models]
        for model, scaler in zip(ranks.models, scalers, strict=True):
            scaler.scale(model(inputs).sum()).backward()
        for scaler, optimizer in zip(scalers, ranks.optimizers, strict=True):
            scaler.unscale_(optimizer)
        for optimizer in ranks.optimizers:
            optimizer.clip_grad_norm_(1e6)
        for optimizer in ranks.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(weights, -2 * inputs) for weights in ranks.weights())


def test_an_overflow_skips_the_step_of_a_rank_that_has_looked_up_no_row() -> None:
    """Its first gradient is a sparse one without values."""
    params = [[nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(2))] for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in params]
    optimizers = [
        dgcopt.DistributedOptimizer(SGD(own, lr=0.1), zip(("rows", "weight"), own, strict=True), comm=comm)
        for own, comm in zip(params, dgcopt.simulated_world(2), strict=True)
    ]
    for (rows, weight), scaler, slope, looked_up in zip(params, scalers, (torch.inf, 1.0), ([3], []), strict=True):
        found = embedding(torch.tensor(looked_up, dtype=torch.int64), rows, sparse=True)
        scaler.scale(found.sum() + slope * weight.sum()).backward()
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.unscale_(optimizer)
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert [scaler.get_scale() for scaler in scalers] == [128.0, 128.0]
    assert all(bool((param == 1).all()) for own in params for param in own)


@pytest.mark.parametrize("every", [0, 1], ids=["launched", "committed"])
def test_gradients_that_another_rank_has_sent_while_they_were_scaled_are_an_error(every: int) -> None:
    """Ranks that take turns cannot agree on an overflow while gradients are scaled."""
    ranks = Ranks(2, lambda params: SGD(params, lr=0.05), check_replicas_every=every)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in ranks.models]
    for model, scaler in zip(ranks.models, scalers, strict=True):
        scaler.scale(model(small_batch()[0]).square().mean()).backward()
    scalers[0].unscale_(ranks.optimizers[0])
    scalers[0].step(ranks.optimizers[0])
    with pytest.raises(dgcopt.ConfigError, match=r"rank 1: the gradients are still scaled.* Call scaler\.unscale_"):
        scalers[1].step(ranks.optimizers[1])
