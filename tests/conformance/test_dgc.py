"""DGC's trajectory equals an independent, naive implementation of its rule."""

import itertools

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.compressors import Memory, Place
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.testing import check_compressor
from tests.conformance.naive_dgc import naive_dgc

SHAPES = [(7, 11), (7,), (4, 3, 5), (4,), (90, 3)]
STEPS = 7


def gradients_of(weights, worker, step):
    """Gradients that depend on the weights, the worker and the step, without ties."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [0.3 * w + torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]


def initial_weights():
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def train_dgc(workers, compressor, lr_at, **sgd):
    comms = dgcopt.simulated_world(workers)
    params = [[nn.Parameter(w.clone()) for w in initial_weights()] for _ in range(workers)]
    optimizers = [
        dgcopt.DistributedOptimizer(
            torch.optim.SGD(mine, lr=1.0, **sgd),
            [(f"p{i}", p) for i, p in enumerate(mine)],
            compressor,
            comm=comm,
            bucket_mb=0.0005,
            first_bucket_mb=0.0005,
        )
        for mine, comm in zip(params, comms, strict=True)
    ]
    for step in range(STEPS):
        for worker, (mine, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr_at(step)
            grads = gradients_of([p.detach() for p in mine], worker, step)
            sum((p * g).sum() for p, g in zip(mine, grads, strict=True)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine in params[1:]:
        assert all(torch.equal(p, q) for p, q in zip(mine, params[0], strict=True))
    residuals = [optimizer.state_dict()["dgcopt"]["memory"].get("residual", {}) for optimizer in optimizers]
    return [p.detach() for p in params[0]], residuals


RULES = [
    rule
    for rule in itertools.product([0.0, 0.9], [False, True], [False, True], [0.0, 0.05])
    if rule[0] or not rule[1]  # torch.optim.SGD has no Nesterov momentum without momentum
]


@pytest.mark.parametrize("workers", [3, 4, 8])
@pytest.mark.parametrize(("momentum", "nesterov", "masking", "weight_decay"), RULES)
def test_every_rule(workers, momentum, nesterov, masking, weight_decay):
    warmup = dgcopt.Warmup(ratios=(0.5, 0.3), steps=2)
    compressor = dgcopt.DGC(0.1, values="fp64", warmup=warmup, momentum_masking=masking)

    def lr_at(step):
        return 0.1 / (1 + step)

    ours, residuals = train_dgc(
        workers, compressor, lr_at, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
    )
    theirs, left = naive_dgc(
        initial_weights(), gradients_of, workers, STEPS, compressor.ratio_at, lr_at, momentum, nesterov, masking,
        weight_decay, None,
    )  # fmt: skip
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)
    for worker in range(workers):
        for i, shape in enumerate(SHAPES):
            if len(shape) > 1:
                torch.testing.assert_close(residuals[worker][f"p{i}"], left[worker][i], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("per", ["model", "tensor"])
def test_local_clipping(workers, per):
    compressor = dgcopt.DGC(0.2, values="fp64", clip=dgcopt.LocalClip(1.5, per=per))
    ours, _ = train_dgc(workers, compressor, lambda step: 0.1, momentum=0.9)
    theirs, _ = naive_dgc(
        initial_weights(), gradients_of, workers, STEPS, compressor.ratio_at, lambda step: 0.1, 0.9, False, True, 0.0,
        (per, 1.5),
    )  # fmt: skip
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-8)  # the clipping norm is float32


@pytest.mark.parametrize(
    ("source", "clip", "rule"),
    [  # not by value with updates, where rounding would decide among the many equal magnitudes
        ("gradient", dgcopt.LocalClip(value=0.4), lambda g: g.clamp(-0.4, 0.4)),
        ("gradient", dgcopt.LocalClip(fn=lambda g: g.tanh()), torch.tanh),
        ("gradient", dgcopt.LocalClip(fn=lambda g: g.tanh_()), torch.tanh),
        ("update", dgcopt.LocalClip(fn=lambda g: g.tanh()), torch.tanh),
    ],
)
def test_clipping_by_value_and_by_a_function(source, clip, rule):
    compressor = dgcopt.DGC(0.2, values="fp64", clip=clip, source=source)
    ours, _ = train_dgc(3, compressor, lambda step: 0.1)
    theirs, _ = naive_dgc(
        initial_weights(), lambda *at: [rule(g) for g in gradients_of(*at)], 3, STEPS, compressor.ratio_at,
        lambda step: 0.1, 0.0, False, True, 0.0, None,
    )  # fmt: skip
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_one_worker(nesterov):
    """A world of one is left bare by DistributedOptimizer, so its exchange is driven by hand."""
    weights = initial_weights()[:1]
    param = nn.Parameter(weights[0].clone())
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9, nesterov=nesterov)
    compressor = dgcopt.DGC(0.1, values="fp64")
    compressor.attach(sgd)
    (bucket,) = build_buckets([("p0", param)], compressor.kind, 2**30, 2**30, None, GradientBucket)
    context = dgcopt.Context(Place(0, 1, "average", 0, bucket.kind, bucket.segments), Memory(bucket.segments))
    for step in range(STEPS):
        bucket.fill([0], [gradients_of([param.detach()], 0, step)[0]])
        context.begin(step)
        (update,) = dgcopt.simulate([compressor.exchange(bucket.grad, context)])
        context.commit()
        with torch.no_grad():
            param -= 0.1 * bucket.segments[0].view(update.add_to(torch.zeros_like(bucket.grad)))
    theirs, _ = naive_dgc(
        weights, gradients_of, 1, STEPS, lambda step: 0.1, lambda step: 0.1, 0.9, nesterov, True, 0.0, None
    )
    torch.testing.assert_close(param.detach(), theirs[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduce", ["gather", "owner"])
@pytest.mark.parametrize("vectors", ["int2", "sign"])
def test_values_of_gaps_between_vectors_leave_no_residual(vectors, reduce):
    """A checkpoint does not hold it, and a run that goes on from one would get other scales."""
    check_compressor(dgcopt.DGC(0.1, vectors=vectors, reduce=reduce), sizes=(3,))
