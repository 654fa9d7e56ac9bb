"""Backward passes are counted, not how often a gradient is added to: reentrant checkpointing adds more than once."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dgcopt
from dgcopt.flat.gradient import GradientBucket
from dgcopt.gradients.tracker import GradientTracker
from tests.support.worlds import bucket_of

PASSES = 2


class Twice(nn.Module):
    """A layer that is used twice, each time within a checkpoint; `head` says whether others are trained outside."""

    def __init__(self, reentrant: bool | None, head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.head = (nn.Linear(6, 6).double() for _ in range(3))
        for outside in (self.first, self.head):
            outside.requires_grad_(head)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.requires_grad_())
        for _ in range(2):
            y = torch.tanh(x)
            if self.reentrant is None:
                x = self.layer(y)
            else:
                x = checkpoint(self.layer, y, use_reentrant=self.reentrant)
        return self.head(x)


class World:
    def __init__(self, reentrant: bool, head: bool, passes: int, compression=None) -> None:
        self.comms = dgcopt.simulated_world(2)
        self.models = [Twice(reentrant, head) for _ in self.comms]
        self.optimizers = [
            dgcopt.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                model.named_parameters(),
                compression,
                backward_passes_per_step=passes,
                first_bucket_mb=1e-4,  # a bucket for each layer
                bucket_mb=1e-4,
                comm=comm,
            )
            for model, comm in zip(self.models, self.comms, strict=True)
        ]

    def backward(self, x: Tensor) -> None:
        for rank, model in enumerate(self.models):
            model(x[rank::2].clone()).square().mean().backward()

    def step(self, seed: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for x in batches(seed):
            self.backward(x)
        for optimizer in self.optimizers:
            optimizer.step()


def batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(PASSES)]


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(1.0, overlap=True)], ids=["dense", "DGC"])
@pytest.mark.parametrize("passes", [1, PASSES], ids=["learned", "announced"])
@pytest.mark.parametrize("head", [True, False], ids=["trained outside too", "all inside"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_layer_used_twice_is_large_batch_training(reentrant: bool, head: bool, passes: int, compression) -> None:
    whole, world = Twice(None, head), World(reentrant, head, passes, compression)
    bare = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        bare.zero_grad()
        for x in batches(step):
            whole(x).square().mean().backward()
        bare.step()
        world.step(step)
    for model in world.models:
        torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)
    # the first step sends nothing early; the second may, before it is known how often gradients are added to
    assert all(optimizer.telemetry.repeated <= 1 for optimizer in world.optimizers)


@pytest.mark.parametrize("head", [True, False], ids=["trained outside too", "all inside"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_one_pass_too_many_is_an_error(reentrant: bool, head: bool) -> None:
    world = World(reentrant, head, PASSES)
    for step in range(3):
        world.step(step)
    for x in batches(3):
        world.backward(x)
    with pytest.raises(RuntimeError, match=rf"rank 0: .* was computed {PASSES + 1} times before step\(\)"):
        world.backward(batches(4)[0])


def test_the_same_loss_twice_is_two_passes() -> None:
    world = World(True, False, PASSES)
    x = batches(0)[0]
    model = world.models[0]
    losses = [model(x.clone()).square().mean() for _ in range(PASSES)]
    for loss in losses:
        loss.backward()
    with pytest.raises(RuntimeError, match="was computed 3 times"):
        model(x.clone()).square().mean().backward()


def test_passes_that_c_plus_plus_runs_are_counted() -> None:
    """No frame of Python tells them apart."""
    world = World(False, True, PASSES)

    def backward(x: Tensor) -> None:
        loss = world.models[0](x.clone()).square().mean()
        run = torch.autograd.Variable._execution_engine.run_backward
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    for x in batches(0):
        backward(x)
    with pytest.raises(RuntimeError, match=rf"was computed {PASSES + 1} times"):
        backward(batches(1)[0])


def test_no_loss_is_kept_alive_beyond_the_step() -> None:
    world, kept = World(True, False, PASSES), []

    def backward(model: nn.Module, x: Tensor) -> None:
        loss = model(x.clone()).square().mean()
        kept.append(weakref.ref(loss))
        loss.backward()

    for x in batches(0):
        for model in world.models:
            backward(model, x)
    for optimizer in world.optimizers:
        optimizer.step()
    gc.collect()
    assert [loss() for loss in kept] == [None] * 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint in another's forward pass
def test_hooks_that_run_in_threads_of_autograds_own() -> None:
    """As on CUDA, where the user's call is on another stack; on the CPU they do if checkpoints are nested deeply."""
    world, threads = World(True, False, PASSES), set()
    layer = world.models[0].layer
    layer.weight.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))

    def nested(x: Tensor, depth: int) -> Tensor:
        return checkpoint(nested, torch.tanh(layer(x)), depth - 1, use_reentrant=True) if depth else x

    def backward() -> None:
        nested(torch.ones(1, 6, dtype=torch.float64, requires_grad=True), 70).sum().backward()

    for _ in range(PASSES):
        backward()
    assert len(threads) > 1
    with pytest.raises(RuntimeError, match="was computed 3 times"):
        backward()


def test_nan_is_found_where_only_a_part_of_a_bucket_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 1)
    params = [torch.zeros(3), torch.zeros(3)]
    bucket, tracker = bucket_of(params), GradientTracker()
    assert isinstance(bucket, GradientBucket)
    for param, value in zip(params, (1.0, torch.nan), strict=True):
        param.grad = torch.full((3,), value)
    tracker.completed(bucket, 0)
    tracker.fill_waiting(bucket, 1.0)
    assert tracker.find_infinite(params, [param.grad for param in params], []) is params[1]
