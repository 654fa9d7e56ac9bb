"""Quantising compressors do what an independent, naive implementation of their rules does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.coding.minmax import MinMaxUInt8
from dgcopt.coding.trits import put_trits, trit_bytes
from dgcopt.compressors import Compressor, Context, Encoded, Memory, Place
from dgcopt.errors import ConfigError, PayloadError
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.kernels import BLOCK, LARGEST, draws
from dgcopt.kernels.rounding.torch import pack_trits
from tests.conformance import naive_quantizers as naive

SIZES = (1, 7, 64, 65, 1000)
RANKS = (1, 2, 3, 5)
STEPS = 3
F = np.float32


class World:
    """One bucket of tensors of several sizes on N simulated ranks."""

    def __init__(self, compressor: Compressor, ranks: int, sizes=SIZES, dtype=torch.float32, op="average") -> None:
        self.compressor, self.sizes, self.dtype = compressor, sizes, dtype
        named = [(f"t{i}", torch.zeros(n, dtype=dtype)) for i, n in enumerate(sizes)]
        self.buckets = [
            build_buckets(named, lambda name, param: None, 2**40, 2**40, None, GradientBucket)[0] for _ in range(ranks)
        ]
        self.contexts = [
            Context(Place(rank, ranks, op, 0, None, b.segments), Memory(b.segments))
            for rank, b in enumerate(self.buckets)
        ]

    def flat(self, tensors) -> Tensor:
        bucket = self.buckets[0]
        flat = bucket.empty()
        for segment, tensor in zip(bucket.segments, tensors, strict=True):
            flat[segment.start : segment.stop] = torch.as_tensor(tensor, dtype=self.dtype)
        return flat

    def parts(self, flat: Tensor) -> list[np.ndarray]:
        return [flat[s.start : s.stop].numpy() for s in self.buckets[0].segments]

    def step(self, grads) -> list[np.ndarray]:
        """What all ranks apply, of each tensor."""
        exchanges = [self.compressor.exchange(self.flat(g), ctx) for g, ctx in zip(grads, self.contexts, strict=True)]
        results = dgcopt.simulate(exchanges)
        for ctx, result in zip(self.contexts, results, strict=True):
            ctx.commit()
            ctx.begin(ctx.step + 1)
            assert torch.equal(self.flat(self.parts(result)), self.flat(self.parts(results[0])))
        return self.parts(results[0])

    def residual(self, rank: int) -> list[np.ndarray]:
        return self.parts(self.contexts[rank].memory["residual"])

    def draws(self, draw) -> list[list[np.ndarray]]:
        """What each rank draws for each tensor, by the rule that all compressors follow."""
        return [self.parts(draw(self.buckets[0].numel, ctx.key(0))) for ctx in self.contexts]


def gradients(ranks: int, step: int, sizes=SIZES) -> list[list[np.ndarray]]:
    """Of different scales, with a tensor of zeros on one rank and single zeros on all."""
    rng = np.random.default_rng(100 * ranks + step)
    grads = [[(rng.standard_normal(n) * 10.0 ** (i - 2)).astype(F) for i, n in enumerate(sizes)] for _ in range(ranks)]
    for grad in grads:
        grad[-1][::10] = 0
    grads[-1][1][:] = 0
    return grads


def chances(numel: int, key: int) -> Tensor:
    """In [0, 1), by the highest 24 bits of what is drawn."""
    return ((draws(numel, key).long() % 2**32) // 2**8).float() / 2**24


def mantissas(numel: int, key: int) -> Tensor:
    """Below 2^23, by the highest 23 bits."""
    return ((draws(numel, key).long() % 2**32) // 2**9).int()


def assert_close(ours, theirs, rtol=1e-5, atol=1e-7) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=rtol, atol=atol * max(1, np.abs(reference).max()))


def assert_same(ours, theirs) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, reference)


def zeros(ranks: int) -> list[list[np.ndarray]]:
    return [[np.zeros(n, F) for n in SIZES] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
class TestEveryRule:
    def test_signsgd(self, ranks: int) -> None:
        world = World(dgcopt.SignSGD(), ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            assert_same(world.step(grads), naive.majority_vote(grads, step))

    @pytest.mark.parametrize("beta", [0.0, 0.9])
    def test_signum(self, ranks: int, beta: float) -> None:
        world, momenta = World(dgcopt.Signum(beta), ranks), zeros(ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            assert_same(world.step(grads), naive.signum(grads, momenta, beta, step))

    @pytest.mark.parametrize(
        ("compressor", "rule"), [(dgcopt.EFSignSGD(), naive.scaled_sign), (dgcopt.OneBit(), naive.two_means)]
    )
    def test_signs_with_error_feedback(self, ranks: int, compressor: Compressor, rule) -> None:
        world, errors = World(compressor, ranks), zeros(ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            assert_close(world.step(grads), naive.with_error_feedback(grads, errors, rule))
        for rank in range(ranks):
            assert_close(world.residual(rank), errors[rank])

    def test_onebit_without_error_feedback(self, ranks: int) -> None:
        world = World(dgcopt.OneBit(error_feedback=False), ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            assert_close(world.step(grads), naive.with_error_feedback(grads, zeros(ranks), naive.two_means))
        assert not world.contexts[0].memory

    @pytest.mark.parametrize("clip", [None, 0.5, 2.5])
    def test_terngrad(self, ranks: int, clip: float | None) -> None:
        world = World(dgcopt.TernGrad(clip), ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            draws = world.draws(chances)
            sent = [
                [naive.ternary(g, d, clip) for g, d in zip(*both, strict=True)]
                for both in zip(grads, draws, strict=True)
            ]
            if clip is None:
                assert_same(world.step(grads), naive.mean_of(sent))
            else:
                assert_close(world.step(grads), naive.mean_of(sent))

    @pytest.mark.parametrize("norm", ["l2", "max"])
    @pytest.mark.parametrize(("levels", "block"), [(1, 64), (7, 512), (5, None), (127, 128)])
    def test_qsgd(self, ranks: int, levels: int, block: int | None, norm: str) -> None:
        world = World(dgcopt.QSGD(levels, block, norm), ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            draws = world.draws(chances)
            sent = [
                [naive.qsgd(g, d, levels, block, norm) for g, d in zip(*both, strict=True)]
                for both in zip(grads, draws, strict=True)
            ]
            assert_close(world.step(grads), naive.mean_of(sent))

    def test_natural(self, ranks: int) -> None:
        world = World(dgcopt.Natural(), ranks)
        for step in range(STEPS):
            grads = gradients(ranks, step)
            draws = world.draws(mantissas)
            sent = [
                [naive.natural(g, d) for g, d in zip(*both, strict=True)] for both in zip(grads, draws, strict=True)
            ]
            assert_same(world.step(grads), naive.mean_of(sent))

    @pytest.mark.parametrize("feedback", [False, True])
    def test_bytegrad(self, ranks: int, feedback: bool) -> None:
        world = World(dgcopt.ByteGrad(feedback), ranks)
        errors = [np.zeros(sum(SIZES), F) for _ in range(ranks)] if feedback else None
        for step in range(STEPS):
            grads = gradients(ranks, step)
            assert_same(world.step(grads), naive.bytegrad(grads, errors))
        for rank in range(ranks if feedback else 0):
            assert_close([np.concatenate(world.residual(rank))], [errors[rank]])

    @pytest.mark.parametrize("compressor", [dgcopt.EFSignSGD(), dgcopt.OneBit(), dgcopt.ByteGrad(True)])
    def test_nothing_is_lost_by_error_feedback(self, ranks: int, compressor: Compressor) -> None:
        world = World(compressor, ranks, dtype=torch.float64)
        given, applied = np.zeros(sum(SIZES)), np.zeros(sum(SIZES))
        for step in range(5):
            grads = gradients(ranks, step)
            given += sum(np.concatenate(grad).astype(np.float64) for grad in grads)
            applied += ranks * np.concatenate(world.step(grads))
        left = sum(np.concatenate(world.residual(rank)) for rank in range(ranks))
        np.testing.assert_allclose(applied + left, given, atol=2e-4)


def test_onebit_of_more_values_than_a_float32_counts() -> None:
    """Of 2^24 and more below zero, and three above it."""
    values = -np.random.default_rng(0).random(2**24 + 2**18 + 1, F)
    values[-3:] = 1, 2, 3
    (applied,) = World(dgcopt.OneBit(error_feedback=False), 1, (len(values),)).step([[values]])
    assert_close([applied], [naive.two_means(values)])


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("value", [1e30, -1e30, 3e38])
def test_bytegrad_of_equal_values_as_large_as_they_come(feedback: bool, value: float) -> None:
    """Levels are 4e-10 apart at most where the range is zero, so that there are 1e39 below a value."""
    world = World(dgcopt.ByteGrad(feedback), 2, (100,))
    applied = world.step([[np.full(100, value, F)]] * 2)
    assert_close(applied, [np.full(100, min(value, LARGEST), F)])
    for rank in range(2 if feedback else 0):
        assert np.isfinite(world.residual(rank)).all()


class TestRandomRounding:
    VALUES = np.array([0.0, 1.0, -1.0, 0.3, -0.7, 1e-3, -2.0, 0.9999], F)

    @pytest.mark.parametrize(
        ("compressor", "variance"),
        [
            (dgcopt.TernGrad(clip=None), lambda v: 2.0 * np.abs(v) - v * v),
            (dgcopt.QSGD(4, None, "max"), lambda v: np.full_like(v, (2.0 / 4) ** 2 / 4)),
            (dgcopt.QSGD(4, None, "l2"), lambda v: np.full_like(v, (v @ v) / 4**3)),
            (dgcopt.Natural(), lambda v: v * v / 8),
        ],
        ids=lambda x: repr(x) if isinstance(x, Compressor) else "",
    )
    def test_the_mean_stays_what_it_was(self, compressor: Compressor, variance) -> None:
        repeats = 2000
        world = World(compressor, 1, sizes=(len(self.VALUES),))
        mean = sum(world.step([[self.VALUES]])[0].astype(np.float64) for _ in range(repeats)) / repeats
        bound = 4.5 * np.sqrt(variance(self.VALUES.astype(np.float64)) / repeats) + 1e-6
        assert (np.abs(mean - self.VALUES) < bound).all()
        assert (np.abs(mean - self.VALUES) > 0).any()

    def test_ranks_and_steps_draw_different_numbers_and_a_repeated_step_the_same(self) -> None:
        for compressor in (dgcopt.TernGrad(), dgcopt.QSGD(), dgcopt.Natural()):
            world = World(compressor, 2)
            grad = world.flat(gradients(1, 0)[0])
            first, other = (compressor.encode(grad, ctx) for ctx in world.contexts)
            assert torch.equal(first, compressor.encode(grad, world.contexts[0]))
            assert not torch.equal(first, other)
            world.contexts[0].begin(1)
            assert not torch.equal(first, compressor.encode(grad, world.contexts[0]))

    def test_natural_rounds_what_is_too_small_or_too_large(self) -> None:
        smallest = 2.0**-126
        values = np.array([0, -0.0, smallest / 2, -smallest / 4, 1e-45, 3e38, -3e38, smallest, 0.5, -1], F)
        world, repeats = World(dgcopt.Natural(), 1, sizes=(len(values),)), 1000
        seen = np.stack([world.step([[values]])[0] for _ in range(repeats)])
        assert set(seen[:, 2].tolist()) == {0.0, smallest} and set(seen[:, 3].tolist()) == {0.0, -smallest}
        assert abs(seen[:, 2].mean(dtype=np.float64) / smallest - 0.5) < 5 * math.sqrt(0.25 / repeats)
        assert (seen[:, 5] == 2.0**100).all() and (seen[:, 6] == -(2.0**100)).all()
        assert_same(seen[:, [0, 1, 7, 8, 9]], np.tile(np.array([0, 0, smallest, 0.5, -1], F), (repeats, 1)))


class TestVotes:
    def test_a_tie_is_zero_and_zeros_cancel(self) -> None:
        world = World(dgcopt.SignSGD(), 2, sizes=(3,))
        up, down = np.array([1, 2, 0], F), np.array([5, -1e-9, 0], F)
        assert_same(world.step([[up], [down]]), [np.array([1, 0, 0], F)])

    def test_zeros_cancel_over_two_steps_among_an_odd_number_of_ranks(self) -> None:
        world, nothing = World(dgcopt.SignSGD(), 3), [[np.zeros(n, F) for n in SIZES]] * 3
        first, second = np.concatenate(world.step(nothing)), np.concatenate(world.step(nothing))
        assert_same([first + second, np.abs(first)], [np.zeros(sum(SIZES)), np.ones(sum(SIZES))])

    def test_a_sum_is_as_many_votes_as_there_are_ranks(self) -> None:
        grads = gradients(3, 0)
        mean, total = (World(dgcopt.SignSGD(), 3, op=op).step(grads) for op in ("average", "sum"))
        assert_same(total, [3 * m for m in mean])

    def test_signum_refuses_an_optimizer_with_momentum(self) -> None:
        with pytest.raises(ConfigError, match="momentum=0"):
            dgcopt.Signum().attach(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
        dgcopt.Signum().attach(torch.optim.SGD([torch.zeros(1)], lr=0.1))

    def test_bytes_do_not_grow_with_ranks(self) -> None:
        at_4, at_64 = (World(dgcopt.SignSGD(), ranks) for ranks in (4, 64))
        numel = at_4.buckets[0].numel
        for world in (at_4, at_64):
            assert world.compressor.payload_bytes(world.contexts[0]) < numel / 8 + numel / 5


RNG = np.random.default_rng(7)
KINDS = {
    "normal": RNG.standard_normal(1000),
    "positive": RNG.uniform(0.5, 2.0, 1000),
    "negative": RNG.uniform(-2.0, -0.5, 1000),
    "zero": np.zeros(1000),
    "tiny": RNG.standard_normal(1000) * 1e-8,
    "an outlier": np.append(RNG.standard_normal(999), 1e4),
    "mostly zero": RNG.standard_normal(1000) * (RNG.random(1000) < 0.05),
    "halves": RNG.integers(-255, 256, 1000) / 2,
}


class TestMinMaxUInt8:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_the_formula_by_the_letter(self, kind: str) -> None:
        x = KINDS[kind].astype(F)
        codes, back = naive.minmax_codes(x)
        code = MinMaxUInt8(len(x))
        message = code.encode(torch.from_numpy(x).unsqueeze(0))
        assert message.shape == (1, code.nbytes) and code.nbytes == 8 + len(x)
        assert_same([message[0, :8].view(torch.float32).numpy()], [np.array([x.min(), x.max()])])
        assert_same([message[0, 8:].numpy(), code.decode(message, [0])[0].numpy()], [codes.astype(np.uint8), back])
        assert codes.min() >= 0 and codes.max() <= 255

    @pytest.mark.parametrize(
        ("low", "high", "codes"),
        [(-3.682945966720581, -3.6425411701202393, (-1, 255)), (41.93254852294922, 41.93268966674805, (0, 256))],
    )
    def test_a_code_does_not_wrap_around(self, low: float, high: float, codes: tuple[int, int]) -> None:
        x = np.array([low, (low + high) / 2, high], F)
        literal, _ = naive.minmax_codes(x)
        assert (literal[0], literal[2]) == codes  # as a byte, -1 is 255 and 256 is 0
        code = MinMaxUInt8(3)
        back = code.decode(code.encode(torch.from_numpy(x).unsqueeze(0)), [0])[0].numpy()
        assert np.abs(back - x).max() <= (x[2] - x[0]) / 255 + 2 * np.spacing(np.abs(x).max())

    @pytest.mark.parametrize("seed", range(20))
    def test_the_error_is_half_a_level_and_two_units_in_the_last_place(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        offset = rng.choice([-1, 1], (2000, 1)) * 10 ** rng.uniform(-7, 7, (2000, 1))
        x = (offset * (1 + 10 ** rng.uniform(-9, 3, (2000, 1)) * rng.random((2000, 8)))).astype(F)
        code = MinMaxUInt8(8)
        back = code.decode(code.encode(torch.from_numpy(x)), range(2000)).numpy().astype(np.float64)
        spread = np.ptp(x.astype(np.float64), axis=1, keepdims=True) + 1e-7
        assert (np.abs(back - x) <= spread / 510 + 2 * np.spacing(np.abs(x).max(1, keepdims=True))).all()

    def test_non_finite_values_are_sent_as_zero(self) -> None:
        x = torch.tensor([[1.0, math.nan, -1.0, math.inf, -math.inf]])
        code = MinMaxUInt8(5)
        back = code.decode(code.encode(x), [0])
        torch.testing.assert_close(back, torch.tensor([[1.0, 0.0, -1.0, 0.0, 0.0]]), rtol=0, atol=0.004)


class TestChunksOfByteGrad:
    @pytest.mark.parametrize("ranks", [2, 3])  # 3 of which do not divide 8 coordinates
    def test_gaps_between_parameters_and_behind_them_do_not_widen_a_range(self, ranks: int) -> None:
        world = World(dgcopt.ByteGrad(), ranks, sizes=(3, 5))
        grad = [np.array([100.0, 100.001, 100.002], F), np.array([100.003, 100.0, 100.001, 100.002, 100.0], F)]
        for ours, theirs in zip(world.step([grad] * ranks), grad, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4  # with zeros in between, 0.2

    def test_more_ranks_than_coordinates(self) -> None:
        world = World(dgcopt.ByteGrad(error_feedback=True), 5, sizes=(1, 2))
        applied = world.step([[np.array([1.0], F), np.array([rank, -1.0], F)] for rank in range(5)])
        assert_close(applied, [np.array([1.0]), np.array([2.0, -1.0])], rtol=1e-6)


class TestTrits:
    @pytest.mark.parametrize("count", [1, 4, 5, 6, 243 * 5, 1001])
    def test_they_come_back(self, count: int) -> None:
        trits = torch.arange(count) // torch.tensor([1, 3, 9, 27, 81]).repeat(-(-count // 5))[:count] % 3 - 1
        packed = pack_trits(trits)
        assert packed.dtype == torch.uint8 and len(packed) == trit_bytes(count) == -(-count // 5)
        back, place = torch.empty(count), torch.zeros(-(-count // BLOCK), dtype=torch.int64)
        put_trits(packed, count, torch.ones(1), place, back, "set", 0)
        assert torch.equal(back.long(), trits)

    def test_a_byte_that_cannot_be(self) -> None:
        packed = pack_trits(torch.ones(10))
        assert packed.tolist() == [242, 242]
        packed[1] = 243
        with pytest.raises(PayloadError, match="rank 3"):
            put_trits(packed, 10, torch.ones(1), torch.tensor([0]), torch.empty(10), "set", 3)


ENCODED = [dgcopt.EFSignSGD(), dgcopt.OneBit(), dgcopt.TernGrad(), dgcopt.QSGD(5), dgcopt.QSGD(100), dgcopt.Natural()]


class TestDamage:
    @pytest.mark.parametrize("compressor", ENCODED, ids=repr)
    def test_a_message_of_another_length(self, compressor: Encoded) -> None:
        ctx = (world := World(compressor, 2)).contexts[0]
        message = compressor.encode(world.flat(gradients(1, 0)[0]), ctx)
        assert len(message) == compressor.payload_bytes(ctx)
        with pytest.raises(PayloadError, match="rank 1"):
            compressor.decode(message[:-1], ctx, 1)

    @pytest.mark.parametrize("compressor", ENCODED[:-1], ids=repr)
    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 3e38])
    def test_a_scale_that_cannot_be(self, compressor: Encoded, value: float) -> None:
        ctx = (world := World(compressor, 2)).contexts[0]
        message = compressor.encode(world.flat(gradients(1, 0)[0]), ctx)
        message[:4].view(torch.float32)[0] = value
        compressor.decode(message, ctx, 1)
        with pytest.raises(PayloadError, match="rank 1"):
            ctx.commit()

    @pytest.mark.parametrize(
        ("compressor", "place"), [(dgcopt.TernGrad(), -1), (dgcopt.QSGD(5), -1), (dgcopt.Natural(), 0)], ids=repr
    )
    def test_a_field_that_cannot_be(self, compressor: Encoded, place: int) -> None:
        ctx = (world := World(compressor, 2)).contexts[0]
        message = compressor.encode(world.flat(gradients(1, 0)[0]), ctx)
        message[place] = 255
        compressor.decode(message, ctx, 1)
        with pytest.raises(PayloadError, match="rank 1"):
            ctx.commit()

    @pytest.mark.parametrize("ends", [(math.nan, 1.0), (0.0, math.inf), (2.0, 1.0), (0.0, 3e38)])
    def test_a_range_that_cannot_be(self, ends: tuple[float, float]) -> None:
        code = MinMaxUInt8(6)
        messages = code.encode(torch.randn(3, 6))
        messages[1, :8] = torch.tensor(ends).view(torch.uint8)
        with pytest.raises(PayloadError, match="rank 4"):
            code.decode(messages, [2, 4, 6])
        with pytest.raises(PayloadError, match=r"\[2, 4\]"):
            code.decode(messages[:, :-1], [2, 4])

    def test_a_count_of_votes_that_cannot_be(self) -> None:
        world = World(dgcopt.SignSGD(), 2)
        exchange = world.compressor.exchange(world.flat(gradients(1, 0)[0]), world.contexts[0])
        exchange.send(exchange.send(None).tensor)
        part = trit_bytes(world.buckets[0].numel // 2)
        with pytest.raises(StopIteration):
            exchange.send(torch.stack((torch.zeros(part), torch.full((part,), 250))).to(torch.uint8))
        with pytest.raises(PayloadError, match="rank 1"):
            world.contexts[0].commit()


class TestExtremes:
    @pytest.mark.parametrize("compressor", [*ENCODED, dgcopt.ByteGrad(True), dgcopt.ByteGrad()], ids=repr)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_largest_and_smallest_numbers_do_not_break_a_message(self, compressor, dtype: torch.dtype) -> None:
        for value in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, 0.0):
            world = World(compressor, 2, dtype=dtype)
            for sign in (1, -1):
                result = world.step([[np.full(n, value) for n in SIZES], [np.full(n, sign * value) for n in SIZES]])
                assert all(np.isfinite(part).all() for part in result)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: dgcopt.Signum(1.0), "beta"),
        (lambda: dgcopt.TernGrad(clip=0.0), "clip"),
        (lambda: dgcopt.QSGD(levels=0), "levels"),
        (lambda: dgcopt.QSGD(levels=128), "levels"),
        (lambda: dgcopt.QSGD(block=BLOCK + 1), "block"),
        (lambda: dgcopt.QSGD(norm="l1"), "norm"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()
