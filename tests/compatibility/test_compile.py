"""torch.compile around training loops: equal to eager, and when the first bucket leaves (docs/compile.md).

Blocks of the model tell when backward reaches them, by an operation that compilers keep as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import dgcopt
from dgcopt import DGC
from dgcopt.collectives import Collective
from dgcopt.gradients.synchronised import synchronised

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "custom_op"), reason="custom_op came with torch 2.4")
REAL = pytest.mark.skipif(not os.environ.get("DGCOPT_TEST_COMPILER"), reason="one job of the CI compiles for real")

BLOCKS = 4
EVENTS: list[str] = []


@torch.library.custom_op("dgcopt_tests::mark", mutates_args=())
def mark(x: Tensor, place: int) -> Tensor:
    return x.clone()


@torch.library.custom_op("dgcopt_tests::reached", mutates_args=())
def reached(grad: Tensor, place: int) -> Tensor:
    EVENTS.append(f"block {place}")
    return grad.clone()


mark.register_fake(lambda x, place: torch.empty_like(x))
reached.register_fake(lambda grad, place: torch.empty_like(grad))
mark.register_autograd(
    lambda ctx, grad: (reached(grad, ctx.place), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "place", inputs[1]),
)


class Block(nn.Module):
    def __init__(self, place: int, width: int) -> None:
        super().__init__()
        self.place, self.layer = place, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return mark(torch.tanh(self.layer(x)), self.place)


def model(width: int = 16) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(Block(place, width) for place in range(BLOCKS)))


def batch(step: int, rank: int, width: int = 16) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def wrapped(models: list[nn.Sequential]) -> list[Any]:
    return [
        dgcopt.DistributedOptimizer(
            SGD(one.parameters(), lr=0.1, momentum=0.9),
            one.named_parameters(),
            DGC(0.3, overlap=True),
            comm=comm,
            bucket_mb=1e-3,
            first_bucket_mb=1e-4,
        )
        for one, comm in zip(models, dgcopt.simulated_world(len(models)), strict=True)
    ]


def note_buckets(optimizer: Any) -> None:
    comm = synchronised(optimizer).comm  # type: ignore[union-attr]
    start = comm.start

    def noting(collective: Collective) -> Any:
        if collective.group == "world":
            EVENTS.append("bucket")
        return start(collective)

    comm.start = noting  # type: ignore[method-assign]


Way = Callable[[list[nn.Sequential], list[Any]], list[Callable[[Tensor], None]]]
"""Returns each rank's forward and backward pass; may compile anything."""


def eager(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    return [lambda x, one=one: one(x).square().mean().backward() for one in models]  # type: ignore[misc]


def whole_model(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    compiled: Any = [torch.compile(one, backend="aot_eager", fullgraph=True) for one in models]
    return eager(compiled, optimizers)


def each_block(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    for one in models:
        for block in one:
            block.compile(backend="aot_eager", fullgraph=True)
    return eager(models, optimizers)


def each_step(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    for optimizer in optimizers:
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    return eager(models, optimizers)


def the_loop(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    return [torch.compile(passes, backend="aot_eager") for passes in eager(models, optimizers)]


def backward_too(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    def within(passes: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def run(x: Tensor) -> None:
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                passes(x)

        return run

    return [within(passes) for passes in whole_model(models, optimizers)]


def for_real(models: list[nn.Sequential], optimizers: list[Any]) -> list[Callable[[Tensor], None]]:
    compiled: Any = [torch.compile(one) for one in models]
    return eager(compiled, optimizers)


@contextmanager
def compiler() -> Iterator[None]:
    """A compiler that has compiled nothing yet, nor after it."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def trained(way: Way) -> tuple[dict[str, Tensor], list[str]]:
    """The weights after four steps of two ranks, and what happened during rank 0's last backward pass, in order."""
    models = [model(), model()]
    optimizers = wrapped(models)
    passes, events = way(models, optimizers), list[str]()
    note_buckets(optimizers[0])
    for step in range(4):
        for rank in reversed(range(2)):
            optimizers[rank].zero_grad()
            EVENTS.clear()
            passes[rank](batch(step, rank))
        events = list(EVENTS)
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach() for name, param in models[0].named_parameters()}, events


def blocks_before_the_first(events: list[str]) -> int:
    return events.index("bucket")


@pytest.mark.parametrize(
    ("way", "blocks", "tolerance"),
    [
        (whole_model, BLOCKS, 0.0),
        (each_block, 1, 0.0),
        (each_step, 1, 0.0),
        pytest.param(the_loop, 1, 0.0, marks=REAL),
        pytest.param(backward_too, 1, 0.0, marks=REAL),
        pytest.param(for_real, BLOCKS, 1e-6, marks=REAL),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_compiled_loop_equals_eager(way: Way, blocks: int, tolerance: float) -> None:
    wanted, early = trained(eager)
    assert blocks_before_the_first(early) == 1
    with compiler():
        ours, events = trained(way)
        breaks = " ".join(counters["graph_break"])
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance)
    assert blocks_before_the_first(events) == blocks, events
    assert way in (the_loop, backward_too) or not breaks, breaks


@pytest.mark.parametrize("way", ["eager", "DDP compiled", "model compiled"])
def test_the_ddp_hook(way: str) -> None:
    """torch cuts the graph at DDP's buckets, which leave as they do without a compiler."""
    width = 600  # more than DDP's first bucket, of one megabyte, in each block
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with compiler():
            inner: Any = model(width)
            within = torch.compile(inner, backend="aot_eager") if way == "model compiled" else inner
            ddp = DistributedDataParallel(within, bucket_cap_mb=1)
            optimizer = SGD(inner.parameters(), lr=0.1, momentum=0.9)
            state, hook = dgcopt.ddp_hook(DGC(0.3), optimizer)

            def noting(state: Any, bucket: Any) -> Any:
                EVENTS.append("bucket")
                return hook(state, bucket)

            noting.__annotations__ = dict(hook.__annotations__)
            ddp.register_comm_hook(state, noting)
            call = torch.compile(ddp, backend="aot_eager") if way == "DDP compiled" else ddp
            for step in range(3):
                EVENTS.clear()
                optimizer.zero_grad()
                call(batch(step, 0, width)).square().mean().backward()
                optimizer.step()
            assert blocks_before_the_first(EVENTS) == 1, EVENTS
    finally:
        dgcopt.shutdown()  # the hook has joined over this group
        dist.destroy_process_group()
