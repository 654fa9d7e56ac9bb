"""Sums by owners equal a naive rule in plain Python; nothing is lost, and bytes do not grow with the ranks."""

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
from torch.utils._python_dispatch import TorchDispatchMode

import dgcopt
from dgcopt.checkpoint import reshare
from dgcopt.coding import SparseCode
from dgcopt.collectives import AllGather, AllToAll, Collective, Link, watched
from dgcopt.compressors import Context, Place
from dgcopt.compressors.reduction import SUMS, OwnerReduction, reduction
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket, SparseSum
from dgcopt.flat.shard import Chunks, Shard, Sharding
from dgcopt.flat.store import Store

FAST, SLOW = Link(1e-6, 1e12), Link(0.0, 1.0)
SHAPES = [(130,), (40, 33), (5,), (64,), (3, 7, 2, 2)]


class Ranks:
    """Simulated ranks with one bucket, and all that they were given and have applied."""

    def __init__(
        self, compressor: dgcopt.Compressor, size: int, shapes: list[tuple[int, ...]] = SHAPES, kind: str | None = None
    ) -> None:
        self.compressor, self.size, self.step, self.shapes, self.kind = compressor, size, 0, shapes, kind
        self.whole = self.certain = False
        self.stores = [Store() for _ in range(size)]
        self.given = self.applied = torch.zeros(0)
        self.link = Link()
        self.begin()

    def begin(self) -> None:
        """Lay buckets out anew."""
        named = [(f"p{i}", torch.nn.Parameter(torch.zeros(s, dtype=torch.float64))) for i, s in enumerate(self.shapes)]
        self.buckets: list[Bucket] = []
        self.contexts: list[Context] = []
        for rank, store in enumerate(self.stores):
            store.release()
            (bucket,) = build_buckets(named, lambda name, param: self.kind, 2**40, 2**40, None, GradientBucket)
            place = Place(rank, self.size, "sum", self.step, self.kind, bucket.segments, link=self.link)
            self.contexts.append(Context(place, store.adopt(bucket)))
            self.buckets.append(bucket)
        if not self.given.numel():
            self.given, self.applied = torch.zeros(bucket.numel).double(), torch.zeros(bucket.numel).double()

    def gradients(self, seed: int) -> list[Tensor]:
        flats = []
        for rank, bucket in enumerate(self.buckets):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            flat = bucket.empty()
            for segment in bucket.segments:
                drawn = torch.randn(segment.numel, generator=generator, dtype=torch.float64)
                flat[segment.start : segment.stop] = (drawn**3).clamp(-3, 3).round() if self.whole else drawn**3
            flats.append(flat)
        return flats

    def exchange(self, grads: list[Tensor], used: list[bool] | None = None, void: bool = False) -> Tensor:
        """One step; returns what all ranks apply."""
        exchanges = []
        for context, grad in zip(self.contexts, grads, strict=True):
            context.begin(self.step, self.certain and used is None and not void)
            exchanges.append(self.compressor.exchange(grad.clone(), context))
        flats = [
            result.add_to(bucket.empty()) if isinstance(result, SparseSum) else result
            for result, bucket in zip(dgcopt.simulate(exchanges), self.buckets, strict=True)
        ]
        assert all(torch.equal(flat, flats[0]) for flat in flats), "ranks apply other bits"
        if void:
            for context in self.contexts:
                context.rollback()
            return flats[0]
        for context in self.contexts:
            context.commit(used)
        self.step += 1
        for segment, there in zip(self.buckets[0].segments, used or [True] * len(self.shapes), strict=True):
            span = slice(segment.start, segment.stop)
            self.applied[span] += flats[0][span] * there
            self.given[span] += sum(grad[span] for grad in grads) * there
        return flats[0]

    def memory(self) -> list[dict[str, dict[str, Tensor]]]:
        return [store.memory() for store in self.stores]

    def assert_nothing_is_lost(self, tolerance: float = 1e-9) -> None:
        """What was applied, and what any rank holds back, add up to what was given."""
        left = torch.zeros_like(self.given)
        for memory in self.memory():
            for kind in memory:
                for segment in self.buckets[0].segments if kind.startswith("residual") else ():
                    left[segment.start : segment.stop] += memory[kind].get(segment.name, torch.zeros(1)).reshape(-1)
        tolerance = 0.0 if self.whole else tolerance
        torch.testing.assert_close(self.applied + left, self.given, rtol=tolerance, atol=tolerance)


def largest(numbers: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(numbers, key=lambda p: (-abs(numbers[p]), p))[:count])


def naive(ratio: float, keep: float, decay: float, steps: list[list[Tensor]], bucket: Bucket) -> list[Tensor]:
    """What is applied in each step, coordinate by coordinate."""
    size = len(steps[0])
    residuals = [torch.zeros(bucket.numel).double() for _ in range(size)]
    sums: list[dict[int, float]] = [{} for _ in range(size)]
    counts = [math.ceil(ratio * segment.numel) for segment in bucket.segments]
    k = sum(counts)
    room = min(k, math.ceil(k / size + 2 * math.sqrt(k / size * (1 - 1 / size))))
    results = []

    def owner(p: int) -> int:
        return (p + ((p // size * 2654435761) % 2**32 >> 16)) % size

    for grads in steps:
        arrived: list[set[int]] = [set() for _ in range(size)]
        sums = [{p: decay * value for p, value in mine.items()} for mine in sums]
        for rank, grad in enumerate(grads):
            v = residuals[rank] = decay * residuals[rank] + grad
            chosen: list[int] = []
            for segment, count in zip(bucket.segments, counts, strict=True):
                chosen += largest({p: float(v[p]) for p in range(segment.start, segment.stop)}, count)
            for other in range(size):
                for p in largest({p: float(v[p]) for p in chosen if owner(p) == other}, room):
                    sums[other][p] = sums[other].get(p, 0.0) + float(v[p])
                    arrived[other].add(p)
                    v[p] = 0
        result = torch.zeros(bucket.numel).double()
        for mine, new in zip(sums, arrived, strict=True):
            for p in new if math.isinf(keep) else largest(mine, math.ceil(keep * k / size)):
                result[p] = mine.pop(p)
        results.append(result)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("keep", "decay"), [(1.0, 1.0), (2.5, 0.9), (0.3, 1.0), (math.inf, 1.0)])
def test_what_is_applied(size: int, keep: float, decay: float) -> None:
    ranks = Ranks(dgcopt.TopK(0.05, "fp64", decay=decay, reduce="owner", keep=keep), size)
    steps = [ranks.gradients(seed) for seed in range(4)]
    expected = naive(0.05, keep, decay, steps, ranks.buckets[0])
    for grads, theirs in zip(steps, expected, strict=True):
        torch.testing.assert_close(ranks.exchange(grads), theirs, rtol=1e-12, atol=1e-12)


def naive_partition(ratio: float, steps: list[list[Tensor]], bucket: Bucket) -> list[Tensor]:
    """What is applied where ranks take turns to choose, coordinate by coordinate."""
    size = len(steps[0])
    residuals = [torch.zeros(bucket.numel).double() for _ in range(size)]
    counts = [math.ceil(ratio * segment.numel) for segment in bucket.segments]
    mean = sum(counts) / size
    room = min(sum(counts), math.ceil(mean + 2 * math.sqrt(mean * (1 - 1 / size))))
    results = []
    for step, grads in enumerate(steps):
        union: set[int] = set()
        for rank, grad in enumerate(grads):
            v = residuals[rank] = residuals[rank] + grad
            chosen: list[int] = []
            for segment, count in zip(bucket.segments, counts, strict=True):
                chosen += largest({p: float(v[p]) for p in range(segment.start, segment.stop)}, count)
            turn = (rank + step) % size
            mine = {p: float(v[p]) for p in chosen if (p + ((p // size * 2654435761) % 2**32 >> 16)) % size == turn}
            union |= set(largest(mine, room))
        result = torch.zeros(bucket.numel).double()
        for v in residuals:
            for p in union:
                result[p] += v[p]
                v[p] = 0
        results.append(result)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_what_is_applied_where_ranks_take_turns(size: int) -> None:
    ranks = Ranks(dgcopt.TopK(0.05, reduce="partition"), size)
    steps = [ranks.gradients(seed) for seed in range(4)]
    expected = naive_partition(0.05, steps, ranks.buckets[0])
    for grads, theirs in zip(steps, expected, strict=True):
        torch.testing.assert_close(ranks.exchange(grads), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reduce", ["gather", "owner", "partition"])
def test_dgc_sends_what_top_k_does(reduce: Any, overlap: bool) -> None:
    """Whether it looks at memory before the vote, or has passed over it already."""
    one = Ranks(dgcopt.DGC(0.05, vectors="sparse", values="fp64", reduce=reduce), 4)
    other = Ranks(dgcopt.TopK(0.05, "fp64", reduce=reduce), 4)
    for seed in range(4):
        for context in one.contexts:
            context.certain = not overlap
        torch.testing.assert_close(one.exchange(one.gradients(seed)), other.exchange(other.gradients(seed)))
        one.assert_nothing_is_lost()


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
    """Whatever happens between steps: what was applied, and what waits anywhere, is what was given."""
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
    """The same for what travels whole, in few bits."""
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
    """The same to the last bit, where bfloat16 holds all sums that there are: of whole numbers, up to 256."""
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
    """What a rank holds back whose data have ended is sent, or kept, as anybody's; to the last bit, in whole numbers.

    Of each epoch we are told how many batches every rank has; over this link "auto" takes owners, if it can.
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


@pytest.mark.parametrize("vectors", ["sparse", "int8"])
def test_at_ratio_one_owners_keep_nothing(vectors: Any) -> None:
    """What they have held back goes with the second step that sends everything, by a schedule or after a checkpoint."""
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
def test_what_owners_hand_back_is_not_lost_where_a_choice_has_a_sum_of_its_own(then: list[str]) -> None:
    ranks = Ranks(OwnSum("owner"), 4)
    for seed in range(3):
        ranks.exchange(ranks.gradients(seed))
    for what in then:
        if what in ("gather", "partition"):
            ranks.compressor = OwnSum(what)
        if what == "void":
            ranks.exchange(ranks.gradients(3), void=True)
    assert_nothing_is_lost(ranks, [("resize", 3)] if then == ["resize"] else ["step", "step"])


def test_few_find_no_room() -> None:
    """Columns, rows and regions of large gradients are spread over all owners: less than 1% waits."""
    size, rows, columns = 16, 256, 64
    compressor = dgcopt.TopK(0.05, "fp64", reduce="owner", granularity="bucket")
    for clustered in (lambda x: x[:, 3], lambda x: x[7], lambda x: x[:64, :16]):
        ranks = Ranks(compressor, size, [(rows, columns)])
        grads = ranks.gradients(0)
        for grad in grads:
            clustered(grad.view(rows, columns)).mul_(1e6)
        ranks.exchange(grads)
        kept = [context.memory["residual"] for context in ranks.contexts]
        sent = [int((grad != left).sum()) for grad, left in zip(grads, kept, strict=True)]
        assert min(sent) > 0.99 * math.ceil(0.05 * rows * columns)


@settings(deadline=None)
@given(st.sampled_from([Sharding, Chunks]), st.integers(1, 3000), st.integers(1, 70))
def test_every_coordinate_has_one_owner(make: type[Sharding], numel: int, size: int) -> None:
    sharding = make(numel, size)
    positions = torch.arange(numel)
    owners, places = sharding.owners(positions), sharding.places(positions)
    for owner in range(size):
        mine = owners == owner
        assert torch.equal(sharding.positions(places[mine], owner), positions[mine])
        assert bool((places[mine].diff() > 0).all()) and bool((places[mine] < sharding.length).all())
    flat = torch.randn(numel)
    left, whole = flat.clone(), torch.zeros(numel)
    for owner in range(size):
        whole += Shard.taken_from(left, sharding, owner).whole()
    assert torch.equal(whole, flat) and not left.any()


def test_bytes_do_not_grow_with_the_ranks() -> None:
    """Twice a rank's own choice, and some room: 4 to 64 ranks."""
    sent = {}
    for size in (4, 16, 64):
        ranks = Ranks(dgcopt.TopK(0.05, "int2", "rice", reduce="owner", granularity="bucket"), size, [(400, 500)])
        told = []
        grads = ranks.gradients(0)
        dgcopt.simulate(
            [
                watched(ranks.compressor.exchange(grad, context), told.append if rank == 0 else lambda _: None)
                for rank, (context, grad) in enumerate(zip(ranks.contexts, grads, strict=True))
            ]
        )
        assert sum(c.nbytes for c in told) == ranks.compressor.payload_bytes(ranks.contexts[0])
        sent[size] = sum(collective.sent(size) for collective in told)
    assert sent[16] < 1.5 * sent[4] and sent[64] < 1.5 * sent[16]
    alone = dgcopt.TopK(0.05, "int2", "rice", granularity="bucket").payload_bytes(ranks.contexts[0])
    assert alone is not None and sent[4] < 2.5 * alone


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_vectors_are_added_up_by_owners(size: int) -> None:
    """Whole values make whole sums; in 8 bits, what rounding loses on the way and of the sum is sent later."""
    whole = Ranks(dgcopt.DGC(0.1, vectors="fp64", reduce="owner"), size, kind="vector")
    coded = Ranks(dgcopt.DGC(0.1, vectors="int8", reduce="owner"), size, kind="vector")
    for seed in range(3):
        grads = whole.gradients(seed)
        torch.testing.assert_close(whole.exchange(grads), sum(grads, torch.zeros(())), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(coded.exchange(grads), sum(grads, torch.zeros(())), rtol=0, atol=float(size))
    for _ in range(8):
        coded.exchange([torch.zeros_like(grad) for grad in grads])
        coded.assert_nothing_is_lost()
    torch.testing.assert_close(coded.applied, coded.given, rtol=1e-4, atol=1e-4)


def test_bytes_of_vectors_do_not_grow_with_the_ranks() -> None:
    """8 bits to the owners, and 8 from them."""
    for size in (4, 16, 64):
        ranks = Ranks(dgcopt.DGC.compact(warmup=None, reduce="owner"), size, [(50_000,)], "vector")
        told: list[Collective] = []
        dgcopt.simulate(
            [
                watched(ranks.compressor.exchange(grad, context), told.append if rank == 0 else lambda _: None)
                for rank, (context, grad) in enumerate(zip(ranks.contexts, ranks.gradients(0), strict=True))
            ]
        )
        assert sum(c.nbytes for c in told) == ranks.compressor.payload_bytes(ranks.contexts[0])
        assert sum(c.sent(size) for c in told) < 2.2 * 50_000


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_auto_is_the_faster_one(size: int) -> None:
    """Over a fast link everyone's choice to everyone; over a slow one owners, if they are more than two."""
    flats = {}
    for reduce, link in (("gather", FAST), ("owner", FAST), ("auto", FAST), ("auto", SLOW)):
        ranks = Ranks(dgcopt.TopK(0.05, "fp32", "rice", reduce=reduce, granularity="bucket"), size, [(100, 500)])
        ranks.link = link
        ranks.begin()
        flats[reduce, link] = torch.stack([ranks.exchange(ranks.gradients(seed)) for seed in range(3)])
    assert torch.equal(flats["auto", FAST], flats["gather", FAST])
    assert torch.equal(flats["auto", SLOW], flats["owner" if size > 2 else "gather", FAST])
    assert size == 1 or not torch.equal(flats["owner", FAST], flats["gather", FAST])


def test_auto_takes_to_owners_as_ranks_and_latency_have_it() -> None:
    """More ranks speak for owners, and so does a slower link; latency speaks against them."""
    numel, code = 10**6, SparseCode("rice", "int2")

    def chosen(size: int, latency: float, bandwidth: float) -> bool:
        ranks = Ranks(dgcopt.TopK(), size, [(numel,)])
        context = ranks.contexts[0].placed(link=Link(latency, bandwidth))
        return isinstance(reduction("auto", code, 1000, context), OwnerReduction)

    assert [chosen(size, 1e-4, 12.5e6) for size in (2, 4, 16, 64, 256)] == [False, False, True, True, True]
    assert [chosen(16, 1e-4, bandwidth) for bandwidth in (1e6, 12.5e6, 1e9, 1e11)] == [True, True, False, False]
    assert [chosen(16, latency, 12.5e6) for latency in (1e-5, 1e-4, 1e-2)] == [True, True, False]


@pytest.mark.parametrize("make", [dgcopt.TopK, dgcopt.DGC])
def test_what_owners_hold_back_is_sent_when_there_are_none_any_more(make: Any) -> None:
    """A checkpoint of owners, loaded where all goes to all: everything is applied within a few steps."""
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
def test_what_owners_hold_back_goes_to_whoever_comes_after_them(other: dgcopt.Compressor) -> None:
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
    assert not any(memory.get(SUMS) for memory in ranks.memory()), "it waits for owners that will not come"
    for _ in range(2):
        ranks.assert_nothing_is_lost(1e-5)  # ByteGrad rounds in float32
        ranks.exchange(ranks.gradients(5))


def test_what_found_no_room_is_counted() -> None:
    """All that is selected belongs to owner 0, whose message has room for half of it; a void step counts nothing."""
    numel, size, k = 256, 4, 16
    sharding = Sharding(numel, size)
    mine = (sharding.owners(torch.arange(numel)) == 0).nonzero().squeeze(1)[:k]
    optimizers = []
    for comm in dgcopt.simulated_world(size):
        param = torch.nn.Parameter(torch.zeros(numel))
        inner = torch.optim.SGD([param], lr=0.1)
        compressor = dgcopt.TopK(k / numel, reduce="owner")
        optimizers.append(dgcopt.DistributedOptimizer(inner, [("p", param)], compressor, comm=comm))
    for void in (False, True):
        for optimizer in optimizers:
            (param,) = optimizer.param_groups[0]["params"]
            slopes = torch.zeros(numel)
            slopes[mine] = torch.arange(1.0, k + 1)
            if void:
                slopes[0] = math.nan
            (param * slopes).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            telemetry = optimizer.telemetry
            assert (telemetry.selected, telemetry.left_out, telemetry.overflow) == (k, k // 2, 0.5)


class Counted(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_rank_does_as_much_whatever_the_number_of_messages() -> None:
    """All of a step's messages are coded together, and read together: as many operations for 64 ranks as for 8."""
    done = {}
    for size in (8, 64):
        ranks = Ranks(dgcopt.TopK(0.05, "int2", "rice", reduce="owner", granularity="bucket"), size, [(400, 500)])
        exchange = ranks.compressor.exchange(ranks.gradients(0)[0], ranks.contexts[0])
        with Counted() as counted:
            collective = next(exchange)
            assert isinstance(collective, AllToAll)
            collective = exchange.send(collective.tensor)
            assert isinstance(collective, AllGather)
            gathered = collective.tensor.expand(size, -1).contiguous()
            with pytest.raises(StopIteration):
                exchange.send(gathered)
        done[size] = counted.count
    assert done[64] < 1.2 * done[8], done


@pytest.mark.parametrize(
    "wrong",
    [
        {"reduce": "owners"},
        {"keep": 0},
        {"keep": True},
        {"keep": math.nan},
        {"keep": 2.0},
        {"keep": 0.5, "reduce": "gather"},
        {"keep": math.inf, "reduce": "partition"},
    ],
)
def test_settings_that_do_not_exist(wrong: dict[str, Any]) -> None:
    for make in (dgcopt.TopK, dgcopt.ChunkedTopK, dgcopt.DGC):
        with pytest.raises(dgcopt.ConfigError, match=next(iter(wrong))):
            make(**wrong)
