"""Hooks written for DistributedDataParallel, inside DistributedOptimizer, on simulated ranks."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

import dgcopt

SIZE = 3


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 5, 2, padding=1), nn.Flatten(), nn.Linear(30, 3))
    return model.to(memory_format=torch.channels_last)


def train(
    make: Callable[[int], Any], steps: int = 5, size: int = SIZE, net: Callable[[], nn.Module] = linear, **settings: Any
) -> tuple[list[Any], list[Any]]:
    """Models and optimizers of all ranks, each with what `make(rank)` returns as compression."""
    models, optimizers = [], []
    for rank, comm in enumerate(dgcopt.simulated_world(size)):
        torch.manual_seed(1)
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizers.append(dgcopt.DistributedOptimizer(sgd, model.named_parameters(), make(rank), comm=comm, **settings))
        models.append(model)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return models, optimizers


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def hook_of(hook: Any, state: Callable[[], Any] = lambda: None) -> Callable[[int], Any]:
    return lambda rank: dgcopt.from_ddp_hook(state(), hook)


POWER = functools.partial(
    powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.1
)
TINY = {"bucket_mb": 0.0003, "first_bucket_mb": 0.0001}


@pytest.mark.parametrize("settings", [{}, TINY], ids=["one bucket", "many"])
@pytest.mark.parametrize(
    ("hook", "state", "close_to_dense"),
    [
        (default_hooks.allreduce_hook, lambda: None, 1e-6),
        (default_hooks.fp16_compress_hook, lambda: None, 1e-3),
        (default_hooks.bf16_compress_hook, lambda: None, 1e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None, 1e-3),
        (quantization_hooks.quantization_pertensor_hook, lambda: None, 3e-2),
        (functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=8), lambda: None, 3e-2),
        (powerSGD_hook.powerSGD_hook, POWER, 0.2),
        (default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook), POWER, 0.2),
    ],
)
def test_hooks_of_torch(hook: Any, state: Any, close_to_dense: float, settings: dict[str, float]) -> None:
    """All ranks end alike, close to plain averages; whatever of it is lossy is not equal to them."""
    models, optimizers = train(hook_of(hook, state), **settings)
    (dense, *_), _ = train(lambda rank: None, **settings)
    assert all(torch.equal(weights(model), weights(models[0])) for model in models)
    error = (weights(models[0]) - weights(dense)).abs().max()
    assert error <= close_to_dense and (error > 0 or close_to_dense <= 1e-6), f"{error} from plain averages"
    sent = optimizers[0].telemetry.payload_bytes
    if hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        gradients = 5 * 2 * sum(param.numel() for param in models[0].parameters())
        assert 0 < sent - gradients < 2000, "16 bits of each number, votes, and the comparisons of the first step"
    assert sent > 0


def test_powersgd_of_torch_takes_channels_last_weights() -> None:
    """It wants contiguous gradients, as DDP hands them out; with full rank it is the mean."""
    state = functools.partial(POWER, matrix_approximation_rank=5)
    (dense, *_), _ = train(lambda rank: None, net=channels_last)
    (ours, *others), _ = train(hook_of(powerSGD_hook.powerSGD_hook, state), net=channels_last)
    assert torch.allclose(weights(ours), weights(dense), atol=1e-5)
    assert all(torch.equal(weights(ours), weights(other)) for other in others)


def test_a_world_of_one_calls_no_hook() -> None:
    def hook(state: Any, bucket: Any) -> Any:
        raise AssertionError("called")

    train(hook_of(hook), size=1)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # by newer torch
def test_every_collective_that_it_has() -> None:
    """Results lie where torch leaves them; futures, their callbacks, and work that is waited for."""
    seen = []

    def hook(group: Any, bucket: Any) -> Any:
        size, mine = group.size(), torch.tensor([1.0, 2.0, 4.0]) * (group.rank() + 1)
        assert bucket.index() == 0 and bucket.is_last() and len(bucket.parameters()) == 4
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert bucket.buffer().shape == (sum(p.numel() for p in bucket.parameters()),)
        sums = mine.clone()
        dist.all_reduce(sums, group=group)
        highest = mine.clone()
        assert dist.all_reduce(highest, dist.ReduceOp.MAX, group, async_op=True).wait()
        rows = [torch.empty(3) for _ in range(size)]
        dist.all_gather(rows, mine, group=group)
        whole = torch.empty(3 * size)
        dist.all_gather_into_tensor(whole, mine, group=group)
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, mine.clone(), group=group)
        turned = torch.empty(3)
        dist.all_to_all_single(turned, mine.clone(), group=group)
        given = mine.clone()
        group.broadcast([given], 1)
        group.barrier().wait()
        seen.append([x.tolist() for x in (sums, highest, *rows, whole, part, turned, given)])
        first = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True).get_future()
        return first.then(lambda f: f.value()[0].clone()).then(lambda f: f.wait() * 1.0)

    models, _ = train(hook_of(hook), steps=2)
    (dense, *_), _ = train(lambda rank: None, steps=2)
    assert torch.allclose(weights(models[0]), weights(dense), atol=1e-6)
    base = torch.tensor([1.0, 2.0, 4.0])
    rows = [(base * (r + 1)).tolist() for r in range(SIZE)]
    for rank in range(SIZE):
        turned = [(r + 1) * base[rank].item() for r in range(SIZE)]
        whole = [x for row in rows for x in row]
        expected = [(base * 6).tolist(), rows[2], *rows, whole, [6 * base[rank].item()], turned, rows[1]]
        assert expected in seen


def test_the_state_is_the_callers() -> None:
    states = [POWER() for _ in range(SIZE)]
    compressors = [dgcopt.from_ddp_hook(state, powerSGD_hook.powerSGD_hook) for state in states]
    train(lambda rank: compressors[rank])
    assert all(state.iter == 5 and len(state.error_dict) == 1 for state in states)
    assert copy.deepcopy(compressors[0]).state is states[0]


def test_a_step_that_is_void_leaves_its_memory_alone() -> None:
    states = [POWER() for _ in range(2)]
    models, optimizers = train(lambda rank: dgcopt.from_ddp_hook(states[rank], powerSGD_hook.powerSGD_hook), size=2)
    before = [copy.deepcopy((state.error_dict, state.iter)) for state in states]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.zero_grad()
        (model(torch.ones(1, 6)).sum() * (torch.inf if rank else 1.0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    for (errors, step), state in zip(before, states, strict=True):
        assert step == state.iter and all(torch.equal(errors[i], state.error_dict[i]) for i in errors)


STEPPING = optimizer_overlap_hooks._hook_then_optimizer(
    default_hooks.allreduce_hook, optimizer_overlap_hooks._OptimizerHookState(SimpleNamespace(step_param=None))
)


@pytest.mark.parametrize(
    ("state", "hook", "words"),
    [
        (None, STEPPING, "steps parameters by itself.* give the hook inside it"),
        (None, default_hooks.fp16_compress_wrapper(STEPPING), "steps parameters by itself.* give the hook inside it"),
        (post_localSGD_hook.PostLocalSGDState(None, None, 5), post_localSGD_hook.post_localSGD_hook, "LocalSGD"),
        (None, None, "takes register_comm_hook's arguments"),
        (None, dgcopt.DGC, "takes register_comm_hook's arguments"),
    ],
)
def test_refused_at_once(state: Any, hook: Any, words: str) -> None:
    with pytest.raises(dgcopt.ConfigError, match=words):
        dgcopt.from_ddp_hook(state, hook)


def test_hooks_that_go_wrong_are_told() -> None:
    def returns(value: Any) -> Callable[[Any, Any], Any]:
        return lambda group, bucket: value

    def asks(group: Any, bucket: Any) -> Any:
        return group.allreduce_coalesced([bucket.buffer()])

    def products(group: Any, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), dist.ReduceOp.PRODUCT, group)

    def fails(group: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / torch.empty(0, 7).view(9))

    for hook, kind, words in (
        (returns(None), dgcopt.ConfigError, "must return a future of the averaged gradient.*not NoneType"),
        (returns(torch.zeros(3)), dgcopt.ConfigError, r"of 123 elements, not a tensor of shape \(3,\)"),
        (asks, dgcopt.ConfigError, "requests allreduce_coalesced"),
        (products, dgcopt.ConfigError, "unsupported reduction"),
        (fails, RuntimeError, "shape"),
    ):
        with pytest.raises(kind, match=words):
            train(hook_of(hook), steps=1)


def test_memory_by_number_of_bucket_cannot_move() -> None:
    models, optimizers = train(hook_of(powerSGD_hook.powerSGD_hook, POWER), size=2, steps=3)
    for model in models:
        model[0].requires_grad_(False)
        model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(dgcopt.ConfigError, match="keeps memory by bucket number"):
        for optimizer in optimizers:
            optimizer.step()


def test_other_ranks_than_the_optimizers_are_refused() -> None:
    class Two(dist.ProcessGroup):
        pass

    group = Two(0, 2)
    with pytest.raises(dgcopt.ConfigError, match=r"has 2 ranks, but the optimizer exchanges among 3"):
        train(lambda rank: dgcopt.from_ddp_hook(group, default_hooks.allreduce_hook), steps=1)


def test_no_hook_at_all() -> None:
    """torch's noop_hook returns a future that is done."""
    models, _ = train(hook_of(debugging_hooks.noop_hook), steps=1)
    assert not torch.equal(weights(models[0]), weights(models[1]))


def test_the_block_of_the_guide() -> None:
    page = (Path(__file__).parents[3] / "docs" / "ddp.md").read_text()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from_ddp_hook" in code]
    model = nn.Linear(2, 2)
    around: dict[str, Any] = {
        "dgcopt": dgcopt,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(block, around)
    assert around["optimizer"].compressor.state is around["state"]
