"""Reduction: sums, means, divisors, Adasum, compression as Horovod knows it, and groups of parameters."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import dgcopt
import dgcopt.hvd as hvd
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, assert_close, momentum_sgd, same, small_batch, small_model, weights_after

SLOWDOWN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class Halves:
    """Another library's compression: static methods, and a context of its own."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).half(), (tensor.dtype, 2)

    @staticmethod
    def decompress(tensor, ctx):
        dtype, factor = ctx
        return tensor.to(dtype) * factor


def test_a_class_with_static_methods():
    assert_close(weights_after(compression=Halves), weights_after(), 1e-3)
    assert not torch.equal(weights_after(compression=Halves)[0], weights_after()[0])


@pytest.mark.parametrize("source", ["dgcopt.hvd", "horovod.torch"])
def test_none_and_fp16(source: str):
    library = pytest.importorskip(source)
    assert_close(weights_after(compression=library.Compression.none), weights_after(), 0)
    assert_close(weights_after(compression=library.Compression.fp16), weights_after(compression=dgcopt.FP16()), 0)
    assert not torch.equal(weights_after(compression=library.Compression.fp16)[0], weights_after()[0])


class Seen:
    """Keeps what would travel."""

    tensors: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def compress(cls, tensor):
        cls.tensors.append(tensor.clone())
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


def test_a_divisor_before_the_sum_changes_what_travels_but_not_what_comes_of_it():
    travelled = {}
    for factor in (1.0, 0.5, 4.0):
        Seen.tensors.clear()
        weights = weights_after(1, gradient_predivide_factor=factor, compression=Seen)
        travelled[factor] = torch.cat(Seen.tensors) * factor
        assert_close(weights, weights_after(1))
        assert_close([travelled[factor]], [travelled[1.0]])
        assert factor == 1 or not torch.equal(torch.cat(Seen.tensors), travelled[1.0])
    with pytest.raises(ValueError, match=r"gradient_predivide_factor not supported with op != Average"):
        weights_after(gradient_predivide_factor=2.0, op=hvd.Sum)


@pytest.mark.parametrize(
    "clip",
    [
        dgcopt.LocalClip(0.01, per="tensor"),
        dgcopt.LocalClip(value=0.001),
        dgcopt.LocalClip(fn=lambda grad: grad.sign() * 0.01),
    ],
    ids=["norm", "value", "fn"],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_gradients_are_clipped_before_they_are_divided(clip, nodes):
    compressor = dgcopt.DGC(0.1, clip=clip)

    def trained(**more):
        compression = compressor if nodes == 1 else dgcopt.Hierarchical(compressor)
        ranks = Ranks(4, momentum_sgd, nodes=nodes, compression=compression, **more)
        for seed in range(4):
            ranks.step(seed)
        return ranks.weights()

    assert same(trained(gradient_predivide_factor=2.0), trained())


def test_a_sum_is_size_averages():
    def scaled(params):
        return SGD(params, lr=0.1 / 3, momentum=0.9)

    assert_close(weights_after(make=scaled, size=3, op=hvd.Sum), weights_after(size=3, op=hvd.Average))


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of 2^n vectors, from the paper's formula alone: of the first half's and the second half's Adasum."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [momentum_sgd, lambda params: Adam(params, lr=0.01)], ids=["sgd", "adam"])
def test_adasum_is_the_papers_formula_of_each_ranks_own_updates(size: int, make):
    ranks = Ranks(size, make, op=hvd.Adasum, bucket_mb=0.001)
    alone = [small_model() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in alone]
    for seed in range(3):
        ranks.step(seed)
        ranks.assert_replicas_equal()
        start = [[param.detach().clone() for param in model.parameters()] for model in alone]
        inputs, targets = small_batch(seed=seed)
        for rank, (model, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rank::size]), targets[rank::size]).backward()
            optimizer.step()
        for place, before in enumerate(start[0]):
            params = [list(model.parameters())[place] for model in alone]
            updates = [(param.detach() - before).numpy().ravel() for param in params]
            combined = before + torch.from_numpy(adasum(updates)).view_as(before)
            for param in params:
                param.data.copy_(combined)
        assert_close(ranks.weights(), list(alone[0].parameters()))


def with_unused() -> nn.Module:
    """A parameter that never gets a gradient, which in Horovod holds up the whole group that it is in."""
    model = small_model()
    model[2].unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return model


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1)])
def test_groups_change_the_buckets_and_nothing_else(compression):
    settings = {
        "by size": lambda model: {},
        "by number": lambda model: {"groups": 3},
        "by list": lambda model: {"groups": [[model[0].weight, model[4].bias], [model[2].unused, model[4].weight]]},
    }
    buckets, weights = {}, {}
    for way, chosen in settings.items():
        ranks = Ranks(2, momentum_sgd, model=with_unused)
        ranks.models = [with_unused() for _ in ranks.models]
        ranks.optimizers = [
            dgcopt.DistributedOptimizer(
                momentum_sgd(model.parameters()), model.named_parameters(), compression, comm=comm, **chosen(model)
            )
            for model, comm in zip(ranks.models, dgcopt.simulated_world(2), strict=True)
        ]
        for seed in range(3):
            ranks.step(seed)
            ranks.assert_replicas_equal()
        layout = synchronised(ranks.optimizers[0]).engine.layout
        buckets[way] = {frozenset(segment.name for segment in bucket.segments) for bucket in layout.buckets}
        weights[way] = ranks.weights()
    assert buckets["by size"] != buckets["by number"] != buckets["by list"] != buckets["by size"]
    for way in ("by number", "by list"):
        assert_close(weights[way], weights["by size"], 0)


def test_the_old_name_of_a_number_of_groups():
    with pytest.warns(DeprecationWarning, match="groups=3"):
        old = Ranks(2, momentum_sgd, num_groups=3)
    new = Ranks(2, momentum_sgd, groups=3)
    ours, theirs = (synchronised(ranks.optimizers[0]).settings for ranks in (old, new))
    assert ours == theirs and theirs.groups
