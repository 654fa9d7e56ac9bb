"""Sparsifiers equal independent, naive implementations of their rules."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt.coding import encode_rice, rice_bytes
from dgcopt.compressors import Memory, Place
from dgcopt.errors import ConfigError, PayloadError
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket, SparseSum
from tests.conformance import naive_sparsifiers as naive

SHAPES = [(1,), (7,), (64,), (70, 67), (65,), (4, 3, 2, 2), (4099,)]
STEPS = 4
SIZES = [1, 2, 3, 5]


def gradients(size, seed=0, shapes=SHAPES, steps=STEPS):
    generator = torch.Generator().manual_seed(seed)
    return [
        [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(size)]
        for _ in range(steps)
    ]


class Ranks:
    """Copies of a compressor on simulated ranks, with one bucket of all tensors each."""

    def __init__(self, compressor, size, shapes=SHAPES, make=lambda params: SGD(params, lr=0.1)):
        self.size, self.step, self.exchanges = size, 0, []
        for rank in range(size):
            params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
            mine = copy.deepcopy(compressor)
            mine.attach(make(params))
            (bucket,) = build_buckets(
                [(f"p{i}", p) for i, p in enumerate(params)], mine.kind, 2**40, 2**40, None, GradientBucket
            )
            place = Place(rank, size, "average", 0, bucket.kind, bucket.segments)
            context = dgcopt.Context(place, Memory(bucket.segments))
            self.exchanges.append((mine, bucket, context))

    def start(self, rank, grads):
        compressor, bucket, context = self.exchanges[rank]
        context.begin(self.step)
        for place, grad in enumerate(grads):
            bucket.fill([place], [grad])
        return compressor.exchange(bucket.grad, context)

    def exchange(self, grads):
        """What the exchange returns, the same on every rank; and that by tensor."""
        results = dgcopt.simulate([self.start(rank, grads[rank]) for rank in range(self.size)])
        flats = []
        for result, (_, bucket, context) in zip(results, self.exchanges, strict=True):
            flats.append(result.add_to(bucket.empty()) if isinstance(result, SparseSum) else result)
            context.commit()
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        self.step += 1
        return results[0], [segment.view(flats[0]).clone() for segment in self.exchanges[0][1].segments]

    def left(self, rank, kind="residual"):
        _, bucket, context = self.exchanges[rank]
        return [segment.view(context.memory[kind]) for segment in bucket.segments]


def assert_equal(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y.view(x.shape).to(x.dtype), rtol=1e-11, atol=1e-11)


def assert_conforms(ranks, grads, reference, memory="residual"):
    applied, left = reference
    for given, theirs in zip(grads, applied, strict=True):
        assert_equal(ranks.exchange(given)[1], theirs)
    for rank in range(ranks.size) if memory else ():
        assert_equal(ranks.left(rank, memory), left[rank])


EXACT = {"values": "fp64"}
WARM = {"warmup": dgcopt.Warmup((1.0, 0.3), steps=1)}


def warm(rule):
    """The ratios of four steps: `WARM` ends at 0.05."""
    return naive.in_turn(rule(1.0), rule(0.3), rule(0.05))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("compressor", "choose", "settings"),
    [
        (dgcopt.TopK(0.1, **EXACT), naive.top_k(0.1), {}),
        (dgcopt.TopK(0.005, indices="rice", decay=0.8, **EXACT), naive.top_k(0.005), {"decay": 0.8}),
        (dgcopt.TopK(0.1, error_feedback=False, **EXACT), naive.top_k(0.1), {"keep": False}),
        (dgcopt.ChunkedTopK(**EXACT), naive.chunked_top_k(1 / 64, 4096), {"decay": 0.95}),
        (dgcopt.ChunkedTopK(0.1, 192, indices="int32", **EXACT), naive.chunked_top_k(0.1, 192), {"decay": 0.95}),
        (dgcopt.ChunkedTopK(0.7, 64, decay=1.0, **EXACT), naive.chunked_top_k(0.7, 64), {}),
        (dgcopt.Threshold(1.5, 0.5, **EXACT), naive.threshold(1.5, 0.5), {}),
        (dgcopt.Threshold(1.0, 0.05, indices="rice", decay=0.9, **EXACT), naive.threshold(1, 0.05), {"decay": 0.9}),
        (dgcopt.CLTK(0.1), naive.leaders_top_k(0.1), {}),
        (dgcopt.CLTK(0.02, beta=0.3), naive.leaders_top_k(0.02), {"beta": 0.3}),
        (dgcopt.TopK(0.05, **EXACT, **WARM), warm(naive.top_k), {}),
        (dgcopt.ChunkedTopK(0.05, 128, **EXACT, **WARM), warm(lambda r: naive.chunked_top_k(r, 128)), {"decay": 0.95}),
        (dgcopt.CLTK(0.05, **WARM), warm(naive.leaders_top_k), {}),
    ],
    ids=lambda value: repr(value) if isinstance(value, dgcopt.Compressor) else "",
)
def test_updates_and_residuals_equal_the_naive_rule(compressor, choose, settings, size):
    grads = gradients(size)
    memory = "residual" if settings.get("keep", True) else None
    assert_conforms(Ranks(compressor, size), grads, naive.sparsified(grads, choose, **settings), memory)


LOSSLESS = [
    dgcopt.TopK(0.05, "int2", "rice"),
    dgcopt.ChunkedTopK(decay=1.0),
    dgcopt.Threshold(1.0, 0.05, "int4", "rice"),
    dgcopt.RandomK(0.05),
    dgcopt.CLTK(0.05),
    dgcopt.CSC(0.3, 256),
]


@pytest.mark.parametrize("compressor", LOSSLESS, ids=lambda compressor: type(compressor).__name__)
def test_all_that_was_given_is_applied_or_left(compressor):
    assert compressor.conserves
    ranks, grads = Ranks(compressor, 3), gradients(3, seed=5)
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for given in grads:
        total = [t + 3 * change for t, change in zip(total, ranks.exchange(given)[1], strict=True)]
    for rank in range(3):
        total = [t + left for t, left in zip(total, ranks.left(rank), strict=True)]
    assert_equal(total, [sum(given[rank][i] for given in grads for rank in range(3)) for i in range(len(SHAPES))])


@pytest.mark.parametrize("compressor", LOSSLESS, ids=lambda compressor: type(compressor).__name__)
def test_at_ratio_one_everything_is_sent(compressor):
    settings = {"values": "fp64"} if hasattr(compressor, "values") else {}
    whole = {"threshold": 1e-9, "at_most": 1.0} if isinstance(compressor, dgcopt.Threshold) else {"ratio": 1.0}
    everything = type(compressor)(**whole, **settings)
    grads = gradients(3)
    ranks = Ranks(everything, 3)
    for given in grads:
        assert_equal(ranks.exchange(given)[1], [sum(mine[i] for mine in given) / 3 for i in range(len(SHAPES))])


# -- RandomK ---------------------------------------------------------------------------------------------------------


def spans(numel, k):
    return [(i * numel // k, (i + 1) * numel // k) for i in range(k)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize(("warmup", "fractions"), [({}, [10] * STEPS), (WARM, [1, Fraction(10, 3), 10, 10])])
def test_random_k_sends_one_coordinate_of_each_span(size, decay, warmup, fractions):
    ranks, grads, drawn = Ranks(dgcopt.RandomK(0.1, decay=decay, **warmup), size), gradients(size), []
    results = []
    for fraction, given in zip(fractions, grads, strict=True):
        result, applied = ranks.exchange(given)
        ((positions, _),) = result.messages
        masks = []
        for segment in ranks.exchanges[0][1].segments:
            here = (positions - segment.start)[(positions >= segment.start) & (positions < segment.stop)].tolist()
            k = math.ceil(segment.numel / fraction)
            assert len(here) == k
            assert all(start <= j < stop for j, (start, stop) in zip(here, spans(segment.numel, k), strict=True))
            masks.append(torch.zeros(segment.numel, dtype=torch.bool).index_fill_(0, torch.tensor(here), True))
        drawn.append([mask.view(shape) for mask, shape in zip(masks, SHAPES, strict=True)])
        results.append(applied)
    assert not any(torch.equal(one[-1], other[-1]) for i, one in enumerate(drawn) for other in drawn[:i])
    theirs, left = naive.sparsified(grads, lambda step, v: [drawn[step]] * size, decay=decay)
    for ours, applied in zip(results, theirs, strict=True):
        assert_equal(ours, applied)
    for rank in range(size):
        assert_equal(ranks.left(rank), left[rank])


def test_unbiased_random_k_has_the_gradient_as_its_mean():
    shapes, trials = [(10,), (7, 3)], 4_000
    ranks = Ranks(dgcopt.RandomK(0.3, seed=1, error_feedback=False, unbiased=True), 2, shapes)
    (given,) = gradients(2, shapes=shapes, steps=1)
    mean = [(a + b) / 2 for a, b in zip(*given, strict=True)]
    total = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(trials):
        total = [t + applied for t, applied in zip(total, ranks.exchange(given)[1], strict=True)]
    for ours, theirs in zip(total, mean, strict=True):
        k = -(-3 * ours.numel() // 10)
        lengths = torch.cat([torch.full((b - a,), b - a) for a, b in spans(ours.numel(), k)]).view(ours.shape)
        deviation = theirs.abs() * ((lengths - 1) / trials).sqrt()  # of a value of x n once in n times
        assert ((ours / trials - theirs).abs() <= 4 * deviation + 1e-9).all()


def test_another_seed_draws_other_coordinates():
    (given,) = gradients(1, steps=1)
    one, other = (Ranks(dgcopt.RandomK(0.1, seed=seed), 1).exchange(given)[0].messages[0][0] for seed in (0, 1))
    assert not torch.equal(one, other)


# -- Threshold -------------------------------------------------------------------------------------------------------


def test_nothing_travels_where_nothing_reaches_the_threshold():
    ranks = Ranks(dgcopt.Threshold(100.0), 2)
    given = gradients(2)[0]
    exchange = ranks.start(0, given[0])
    next(exchange)
    with pytest.raises(StopIteration) as stop:
        exchange.send(torch.zeros(2, 1, dtype=torch.int64))
    assert stop.value.value.messages == []
    assert_equal(Ranks(dgcopt.Threshold(100.0), 2).exchange(given)[1], [torch.zeros(shape) for shape in SHAPES])


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_count_that_cannot_be_names_its_rank(count):
    ranks = Ranks(dgcopt.Threshold(1.0), 2)
    exchange = ranks.start(0, gradients(2)[0][0])
    mine = next(exchange).tensor
    with pytest.raises(PayloadError, match=f"rank 1 claims {count} values"):
        exchange.send(torch.stack((mine, torch.tensor([count]))))


# -- CLTK ------------------------------------------------------------------------------------------------------------


def test_a_leader_of_another_model_is_named():
    ranks = Ranks(dgcopt.CLTK(0.1), 3, shapes=[(640,)])
    exchange = ranks.start(1, [torch.randn(640, dtype=torch.float64)])
    assert next(exchange).root == 0
    with pytest.raises(PayloadError, match="from rank 0"):
        exchange.send(
            encode_rice(torch.arange(6400, 12800, 100), torch.tensor([64]), 64, 12800)[0, : rice_bytes(64, 640)]
        )


def test_leaders_take_turns():
    ranks = Ranks(dgcopt.CLTK(0.1), 3)
    roots = []
    for given in gradients(3):
        roots.append(next(ranks.start(0, given[0])).root)
        ranks.exchange(given)
    assert roots == [0, 1, 2, 0]


# -- CSC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_coarse_chunks(size, momentum, nesterov):
    numel = sum(-(-torch.Size(shape).numel() // 64) * 64 for shape in SHAPES)
    assert numel == 145 * 64  # at most 1280 in a chunk: 8 chunks of 19 blocks
    grads = gradients(size)
    ranks = Ranks(
        dgcopt.CSC(0.3, 1280), size, make=lambda params: SGD(params, lr=0.1, momentum=momentum, nesterov=nesterov)
    )
    assert_conforms(ranks, grads, naive.coarse_chunks(grads, [0.3] * STEPS, 8, 1216, momentum, nesterov))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_more_chunks_travel_in_a_warm_up(momentum):
    grads = gradients(2)
    ranks = Ranks(dgcopt.CSC(0.05, 1280, **WARM), 2, make=lambda params: SGD(params, lr=0.1, momentum=momentum))
    assert_conforms(ranks, grads, naive.coarse_chunks(grads, [1.0, 0.3, 0.05, 0.05], 8, 1216, momentum))


def test_equal_chunks_are_taken_in_order():
    applied = Ranks(dgcopt.CSC(0.3, 64), 2, [(640,)]).exchange([[torch.ones(640).double()]] * 2)[1]
    assert_equal(applied, [torch.cat((torch.ones(192), torch.zeros(448)))])


def test_all_chunks_together_are_dense_training_with_momentum():
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(3)).double() for shape in [(30, 9), (5,)]]

    def train(compressor):
        params = [[nn.Parameter(w.clone()) for w in weights] for _ in range(2)]
        optimizers = [
            dgcopt.DistributedOptimizer(SGD(mine, lr=0.1, momentum=0.9, weight_decay=0.01), None, compressor, comm=comm)
            for mine, comm in zip(params, dgcopt.simulated_world(2), strict=True)
        ]
        for given in gradients(2, shapes=[(30, 9), (5,)], steps=5):
            for mine, optimizer, grads in zip(params, optimizers, given, strict=True):
                optimizer.zero_grad()
                sum((p * g).sum() for p, g in zip(mine, grads, strict=True)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in params[0]]

    assert_equal(train(dgcopt.CSC(1.0, 64)), train(None))


# -- DeMo ------------------------------------------------------------------------------------------------------------

SMALL = [(1,), (7,), (65,), (66, 5), (3, 2, 2, 2), (70, 67)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ratio", "decay", "sign"), [(0.1, 0.9, False), (1 / 128, 0.999, True)])
def test_decoupled_momentum(size, ratio, decay, sign):
    grads = gradients(size, shapes=SMALL, steps=3)
    ranks = Ranks(dgcopt.DeMo(ratio, decay, "fp64", sign=sign), size, SMALL)
    assert_conforms(ranks, grads, naive.decoupled_momentum(grads, ratio, decay, sign), "momentum")


def test_a_constant_tile_is_one_coefficient():
    ranks = Ranks(dgcopt.DeMo(values="fp64", sign=False), 2, [(128, 64), (64,)])
    given = [torch.full((128, 64), 3.0, dtype=torch.float64), torch.full((64,), -2.0, dtype=torch.float64)]
    assert_equal(ranks.exchange([given, given])[1], given)
    assert_equal(ranks.left(0, "momentum"), [torch.zeros(128, 64), torch.zeros(64)])


def test_rounding_stays_in_the_momentum():
    shapes = [(70, 67)]
    coarse, exact = (Ranks(dgcopt.DeMo(0.1, 1.0, values, sign=False), 1, shapes) for values in ("sign", "fp64"))
    ((given,),) = gradients(1, shapes=shapes, steps=1)
    for ranks in (coarse, exact):
        applied = ranks.exchange([given])[1]
        assert_equal([applied[0] + ranks.left(0, "momentum")[0]], given)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: SGD(params, lr=0.1, momentum=0.9), "keeps the momentum itself"),
        (lambda params: AdamW(params, lr=0.1), "AdamW would apply its own rule"),
    ],
)
def test_optimizers_with_a_rule_of_their_own_are_refused(make, reason):
    with pytest.raises(ConfigError, match=reason):
        dgcopt.DeMo().attach(make([nn.Parameter(torch.zeros(3))]))


# -- TopK of updates -------------------------------------------------------------------------------------------------


def gradients_of(weights, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [0.3 * w + torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]


def train_adamw(size, weights, steps, gradients_of, **settings):
    """Weights and residuals of TopK around AdamW."""
    params = [[nn.Parameter(w.clone()) for w in weights] for _ in range(size)]
    optimizers = [
        dgcopt.DistributedOptimizer(
            AdamW(mine, **settings),
            [(f"p{i}", p) for i, p in enumerate(mine)],
            dgcopt.TopK(0.1, values="fp64"),
            comm=comm,
            bucket_mb=0.001,
            first_bucket_mb=0.0005,
        )
        for mine, comm in zip(params, dgcopt.simulated_world(size), strict=True)
    ]
    for step in range(steps):
        for rank, (mine, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            optimizer.zero_grad()
            grads = gradients_of([p.detach() for p in mine], rank, step)
            sum((p * g).sum() for p, g in zip(mine, grads, strict=True)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine in params[1:]:
        assert all(torch.equal(p, q) for p, q in zip(mine, params[0], strict=True))
    left = [optimizer.state_dict()["dgcopt"]["memory"]["residual"] for optimizer in optimizers]
    return [p.detach() for p in params[0]], [[mine[f"p{i}"] for i in range(len(weights))] for mine in left]


ADAMW = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_updates_of_local_adam_travel(size):
    weights = gradients(1, seed=9, shapes=[(7, 11), (7,), (90, 3), (1,)], steps=1)[0][0]
    ours, left = train_adamw(size, weights, 6, gradients_of, **ADAMW)
    theirs, waiting = naive.local_adamw(weights, gradients_of, size, 6, ratio=0.1, **ADAMW)
    assert_equal(ours, theirs)
    for mine, reference in zip(left, waiting, strict=True):
        assert_equal(mine, reference)


def test_decoupled_weight_decay_is_applied_whole_and_never_waits():
    weights = gradients(1, seed=9, shapes=[(7, 11), (7,)], steps=1)[0][0]
    ours, left = train_adamw(2, weights, 3, lambda weights, *_: [torch.zeros_like(w) for w in weights], **ADAMW)
    for _ in range(3):
        weights = [w * (1 - 0.05 * 0.1) for w in weights]
    assert all(torch.equal(x, y) for x, y in zip(ours, weights, strict=True))
    assert not any(held.any() for mine in left for held in mine)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: dgcopt.RandomK(0.0), "ratio"),
        (lambda: dgcopt.RandomK(unbiased=True), "unbiased=True scales values up"),
        (lambda: dgcopt.Threshold(0.0), "threshold must be a positive number"),
        (lambda: dgcopt.Threshold(at_most=1.5), "at_most"),
        (lambda: dgcopt.ChunkedTopK(chunk=100), "multiple of 64"),
        (lambda: dgcopt.ChunkedTopK(values="int3"), 'values must be "fp64", "fp32"'),
        (lambda: dgcopt.CLTK(beta=0), "beta"),
        (lambda: dgcopt.CSC(chunk=10), "at least 64"),
        (lambda: dgcopt.DeMo(decay=1.1), "decay"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, reason):
    with pytest.raises(ConfigError, match=reason):
        make()
