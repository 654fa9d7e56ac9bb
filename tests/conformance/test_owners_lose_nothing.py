"""Nothing is lost by sums by owners: applied values and residuals add up to the gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dgcopt
from dgcopt.checkpoint import reshare
from dgcopt.compressors import Context
from dgcopt.compressors.reduction import SUMS
from dgcopt.flat.store import Store
from tests.conformance.owners import FAST, SHAPES, SLOW, Ranks

events = st.lists(
    st.one_of(
        st.sampled_from(["step", "void", "new buckets", "checkpoint"]),
        st.tuples(st.just("resize"), st.integers(1, 5)),
        st.tuples(st.just("unused"), st.integers(0, len(SHAPES) - 1)),
        st.tuples(st.just("no data"), st.integers(0, 4)),
        st.tuples(st.just("another link"), st.integers(0, 1)),
    ),
    min_size=3,
    max_size=8,
)


def assert_nothing_is_lost(ranks: Ranks, events: list[Any]) -> None:
    for seed, event in enumerate(events):
        what, which = event if isinstance(event, tuple) else (event, 0)
        grads = ranks.gradients(seed)
        if what == "no data":
            grads[which % ranks.size].zero_()
        if what == "unused":
            used = [place != which for place in range(len(SHAPES))]
            for grad in grads:
                segment = ranks.buckets[0].segments[which]
                grad[segment.start : segment.stop] = 0
            before = ranks.memory()
            ranks.exchange(grads, used)
            for then, now in zip(before, ranks.memory(), strict=True):
                for kind, by_name in then.items():
                    if not by_name:  # all is in buckets
                        continue
                    assert torch.equal(by_name[f"p{which}"], now[kind][f"p{which}"]), "memory of an unused tensor moved"
        elif what == "void":
            before = ranks.memory()
            ranks.exchange(grads, void=True)
            for then, now in zip(before, ranks.memory(), strict=True):
                for kind, by_name in then.items():
                    for name, held in by_name.items():
                        assert torch.equal(held, now[kind][name]), "a step that was not taken has changed memory"
        elif what == "new buckets":
            ranks.begin()
        elif what == "another link":
            ranks.link = (FAST, SLOW)[which]
            ranks.begin()
        elif what == "checkpoint":
            for store in ranks.stores:
                state = copy.deepcopy(store.state())
                store.restore(state)
            ranks.begin()
        elif what == "resize":
            held = [{"dgcopt": {"rank": r, "world_size": ranks.size, **s.state()}} for r, s in enumerate(ranks.stores)]
            ranks.stores = [Store() for _ in range(which)]
            for rank, store in enumerate(ranks.stores):
                store.restore(reshare(held, rank, which)["dgcopt"])
            ranks.size = which
            ranks.begin()
        if what not in ("unused", "void"):
            ranks.exchange(ranks.gradients(100 + seed) if what != "no data" else grads)
        ranks.assert_nothing_is_lost()


@settings(deadline=None, max_examples=60)
@given(
    events=events,
    size=st.integers(1, 5),
    values=st.sampled_from(["fp64", "fp32", "int8", "int2", "sign"]),
    ratio=st.sampled_from([0.01, 0.1, 0.6]),
    keep=st.sampled_from([0.2, 1.0, 3.0, math.inf]),
    reduce=st.sampled_from(["owner", "partition", "auto"]),
)
def test_nothing_is_lost(events: list[Any], size: int, values: Any, ratio: float, keep: float, reduce: Any) -> None:
    """Applied values and residuals add up to the gradients, whatever happens between steps."""
    way = {"reduce": reduce} if reduce == "partition" else {"reduce": reduce, "keep": keep}
    assert_nothing_is_lost(Ranks(dgcopt.TopK(ratio, values, **way), size), events)


@settings(deadline=None, max_examples=60)
@given(
    events=events,
    size=st.integers(1, 5),
    vectors=st.sampled_from(["fp64", "fp16", "int8", "int2", "sign"]),
    reduce=st.sampled_from(["owner", "partition", "auto"]),
)
def test_nothing_of_vectors_is_lost(events: list[Any], size: int, vectors: Any, reduce: Any) -> None:
    """The same for vectors, which are sent whole in few bits."""
    assert_nothing_is_lost(Ranks(dgcopt.DGC(0.1, vectors=vectors, reduce=reduce), size, kind="vector"), events)


@settings(deadline=None, max_examples=60)
@given(
    events=events,
    size=st.integers(1, 5),
    values=st.sampled_from(["fp32", "fp16", "bf16"]),
    kind=st.sampled_from(["matrix", "vector"]),
    reduce=st.sampled_from(["gather", "owner", "partition", "auto"]),
    overlap=st.booleans(),
)
def test_nothing_is_lost_by_residuals_of_half_precision(
    events: list[Any], size: int, values: Any, kind: str, reduce: Any, overlap: bool
) -> None:
    """The same to the last bit: bfloat16 holds whole numbers up to 256 exactly."""
    ranks = Ranks(dgcopt.DGC(0.05, values=values, vectors=values, residual="bf16", reduce=reduce), size, kind=kind)
    ranks.whole, ranks.certain = True, not overlap
    assert_nothing_is_lost(ranks, events)
    held = [flat for context in ranks.contexts for name, flat in context.memory.items() if name == "residual"]
    assert all(flat.dtype == torch.bfloat16 for flat in held)


@pytest.mark.parametrize("reduce", ["gather", "owner", "partition", "auto"])
@settings(deadline=None, max_examples=15)
@given(
    epochs=st.lists(st.permutations(range(5)), min_size=1, max_size=3),
    size=st.integers(2, 4),
    vectors=st.sampled_from(["dense", "sparse", "bf16"]),
    residual=st.sampled_from(["full", "bf16"]),
    overlap=st.booleans(),
)
def test_nothing_is_lost_where_ranks_run_out_of_data(
    reduce: Any, epochs: list[list[int]], size: int, vectors: Any, residual: Any, overlap: bool
) -> None:
    """The residual of a rank without data is sent or kept like any other, to the last bit in whole numbers.

    `epochs` are the numbers of batches of each rank. Over this link "auto" takes owners if it can.
    """
    generator = torch.Generator().manual_seed(0)
    compressor = dgcopt.DGC(0.05, vectors=vectors, residual=residual, reduce=reduce, overlap=overlap)
    ranks: list[tuple[Any, dict[str, torch.nn.Parameter]]] = []
    for comm in dgcopt.simulated_world(size):
        comm.link = SLOW
        params = {f"p{i}": torch.nn.Parameter(torch.zeros(shape).double()) for i, shape in enumerate(SHAPES)}
        inner = torch.optim.SGD(params.values(), lr=1.0)
        optimizer = dgcopt.DistributedOptimizer(inner, params.items(), copy.deepcopy(compressor), comm=comm, op="sum")
        ranks.append((optimizer, params))
    left = {name: torch.zeros_like(param) for name, param in ranks[0][1].items()}
    for batches in epochs:
        loops = [contextlib.ExitStack() for _ in ranks]
        for loop, (optimizer, _) in zip(loops, ranks, strict=True):
            loop.enter_context(dgcopt.join(optimizer))
        for step in range(6):
            there = []
            for loop, count, (optimizer, params) in zip(loops, batches, ranks, strict=False):
                if step == count:
                    loop.close()
                if step < count:
                    there.append(optimizer)
                    slopes = {n: torch.randint(-3, 4, p.shape, generator=generator).double() for n, p in params.items()}
                    torch.stack([(p * slopes[n]).sum() for n, p in params.items()]).sum().backward()
                    left = {name: total + slopes[name] for name, total in left.items()}
            for optimizer in there:
                optimizer.step()
                optimizer.zero_grad()
    for optimizer, params in ranks:
        for kind, by_name in optimizer.state_dict()["dgcopt"]["memory"].items():
            for name in by_name if kind.startswith("residual") else ():
                left[name] -= by_name[name]
        assert all(torch.equal(param, ranks[0][1][name]) for name, param in params.items()), "ranks apply other bits"
    for name, param in ranks[0][1].items():
        assert torch.equal(-param, left[name]), name


@pytest.mark.parametrize("vectors", ["sparse", "int8"])
def test_at_ratio_one_owners_keep_nothing(vectors: Any) -> None:
    """The second step at ratio 1 sends all that owners held back, by a schedule or after a checkpoint."""
    warmup = dgcopt.Warmup((0.05,), steps=3)
    compressor = dgcopt.DGC(1.0, vectors=vectors, values="int2", reduce="owner", warmup=warmup)
    ranks = Ranks(compressor, 4, kind="vector" if vectors == "int8" else None)
    for seed in range(5):
        ranks.exchange(ranks.gradients(seed))
        held = sum(float(by_name.abs().sum()) for memory in ranks.memory() for by_name in memory.get(SUMS, {}).values())
        assert (held > 0) == (seed < 3)
    assert not any(context.memory["residual"].any() for context in ranks.contexts)
    ranks.assert_nothing_is_lost()


class OwnSum(dgcopt.compressors.Sparse):
    """A choice that adds the residual up in memory of its own."""

    def __init__(self, reduce: Any) -> None:
        self.reduce, self.values = reduce, "fp64"

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        v = grad + ctx.memory.hold("residual")
        indices = v.abs().topk(50).indices.sort().values
        return v, indices, v[indices]


@pytest.mark.parametrize("then", [["gather"], ["resize"], ["void", "gather"], ["partition"]])
def test_sums_of_former_owners_are_not_lost_where_a_choice_has_a_sum_of_its_own(then: list[str]) -> None:
    ranks = Ranks(OwnSum("owner"), 4)
    for seed in range(3):
        ranks.exchange(ranks.gradients(seed))
    for what in then:
        if what in ("gather", "partition"):
            ranks.compressor = OwnSum(what)
        if what == "void":
            ranks.exchange(ranks.gradients(3), void=True)
    assert_nothing_is_lost(ranks, [("resize", 3)] if then == ["resize"] else ["step", "step"])


@pytest.mark.parametrize("make", [dgcopt.TopK, dgcopt.DGC])
def test_sums_of_former_owners_are_sent_within_a_few_steps(make: Any) -> None:
    """A checkpoint of owners, loaded by an all-gather: all sums are applied within a few steps."""
    ranks = Ranks(make(0.05, reduce="owner"), 4)
    zero = [torch.zeros_like(grad) for grad in ranks.gradients(0)]
    for seed in range(3):
        ranks.exchange(ranks.gradients(seed))
    for store in ranks.stores:
        store.restore(copy.deepcopy(store.state()))
    assert any("owner" in kind and any(map(torch.any, held.values())) for kind, held in ranks.memory()[0].items())
    ranks.compressor = make(0.5, reduce="gather")
    ranks.begin()
    for _ in range(3):
        ranks.exchange([grad.clone() for grad in zero])
        ranks.assert_nothing_is_lost()
    torch.testing.assert_close(ranks.applied, ranks.given, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        dgcopt.Threshold(0.5, at_most=1.0, values="fp64"),
        dgcopt.RandomK(0.5),
        dgcopt.PowerSGD(start_step=0),
        dgcopt.CLTK(0.5),
        dgcopt.CSC(0.5, 64),
        dgcopt.EFSignSGD(),
        dgcopt.ByteGrad(error_feedback=True),
        dgcopt.ChunkedTopK(0.5, 64, decay=1.0),
        dgcopt.TopK(0.5, reduce="partition"),
        dgcopt.DGC(1.0, vectors="sparse"),
    ],
    ids=lambda other: type(other).__name__,
)
def test_sums_of_former_owners_join_the_residuals_of_the_next_compressor(other: dgcopt.Compressor) -> None:
    """A checkpoint of owners, loaded where there are none: each rank adds it to its own residual in the first step."""
    ranks = Ranks(dgcopt.TopK(0.05, "fp64", reduce="owner"), 4)
    for seed in range(3):
        ranks.exchange(ranks.gradients(seed))
    for store in ranks.stores:
        store.restore(copy.deepcopy(store.state()))
    assert any(map(torch.any, ranks.memory()[0][SUMS].values()))
    ranks.compressor = other
    ranks.begin()
    ranks.exchange(ranks.gradients(3), void=True)
    ranks.assert_nothing_is_lost()
    segment, grads = ranks.buckets[0].segments[1], ranks.gradients(4)
    for grad in grads:
        grad[segment.start : segment.stop] = 0
    ranks.exchange(grads, [place != 1 for place in range(len(SHAPES))])
    assert not any(memory.get(SUMS) for memory in ranks.memory()), "sums wait for owners that do not exist"
    for _ in range(2):
        ranks.assert_nothing_is_lost(1e-5)  # ByteGrad rounds in float32
        ranks.exchange(ranks.gradients(5))
