"""PowerSGD against its rule, written anew in NumPy for N workers, and against what follows from it."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.compressors import Memory, Place, PowerSGD
from dgcopt.compressors.lowrank.powersgd import first_seed, orthogonal
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.testing import check_compressor

SHAPES = [(20, 15), (7,), (6, 5, 4), (20, 15), (3, 2)]


class Reference:
    """Matrices are approximated one after another, by the projection on P's span, which needs no Q but as the start."""

    def __init__(self, rank: int, feedback: bool, seed: int, halves: bool = False) -> None:
        self.rank, self.feedback, self.halves, self.steps = rank, feedback, halves, 0
        self.compressed = [len(s) > 1 and 2 * rank * (s[0] + np.prod(s[1:])) < np.prod(s) for s in SHAPES]
        draws = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000)))
        self.p, self.q, self.e = {}, {}, {}
        # torch draws for all matrices of a shape before those of the next
        order = sorted(range(len(SHAPES)), key=lambda place: SHAPES.index(SHAPES[place]))
        for place in (p for p in order if self.compressed[p]):
            columns = int(np.prod(SHAPES[place][1:]))
            self.q[place] = torch.randn(1, columns, rank, generator=draws, dtype=torch.float64)[0].numpy()

    def step(self, grads: list[list[np.ndarray]]) -> list[np.ndarray]:
        results = []
        for place, shape in enumerate(SHAPES):
            mine = [g[place] for g in grads]
            if not self.compressed[place]:
                results.append(np.mean(mine, 0))
                continue
            held = self.e.get(place, [0.0] * len(mine))
            matrices = [(g.reshape(shape[0], -1) + e) for g, e in zip(mine, held, strict=True)]
            mean = np.mean(matrices, 0)
            if not self.halves:
                p = np.linalg.qr(mean @ self.q[place])[0]
                result, self.q[place] = p @ p.T @ mean, mean.T @ p
            elif self.steps % 2 == 0:
                q = np.linalg.qr(self.q[place])[0]
                result, self.p[place] = mean @ q @ q.T, mean @ q
            else:
                p = np.linalg.qr(self.p[place])[0]
                result, self.q[place] = p @ p.T @ mean, mean.T @ p
            if self.feedback:
                self.e[place] = [m - result for m in matrices]
            results.append(result.reshape(shape))
        self.steps += 1
        return results


def bucket_of(tensors: list[Tensor]) -> Bucket:
    named = [(f"t{place}", tensor) for place, tensor in enumerate(tensors)]
    (bucket,) = build_buckets(named, lambda name, param: None, 2**40, 2**40, None, GradientBucket)
    return bucket


def context_of(bucket: Bucket, rank: int, size: int) -> dgcopt.Context:
    return dgcopt.Context(Place(rank, size, "average", 0, None, bucket.segments), Memory(bucket.segments))


class World:
    """One bucket of SHAPES on N simulated ranks."""

    def __init__(
        self, compressor: PowerSGD, size: int, op: str = "average", dtype: torch.dtype = torch.float64
    ) -> None:
        self.compressor, self.comms = compressor, dgcopt.simulated_world(size)
        self.buckets = [bucket_of([torch.zeros(shape, dtype=dtype) for shape in SHAPES]) for _ in range(size)]
        self.contexts = [context_of(bucket, rank, size).placed(op=op) for rank, bucket in enumerate(self.buckets)]

    def step(self, grads: list[list[Tensor]]) -> list[Tensor]:
        exchanges = []
        for context, bucket, mine in zip(self.contexts, self.buckets, grads, strict=True):
            for place, grad in enumerate(mine):
                bucket.fill([place], [grad])
            exchanges.append(self.compressor.exchange(bucket.grad, context))
        results = dgcopt.simulate(exchanges, self.comms)
        for context in self.contexts:
            context.commit()
            context.begin(context.step + 1)
        assert all(torch.equal(s.view(results[0]), s.view(r)) for r in results for s in self.buckets[0].segments)
        return [segment.view(results[0]) for segment in self.buckets[0].segments]


def gradients(size: int, step: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(size)]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("iterations", [1, 0.5])
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (2, 3), (4, 4)])
def test_every_step_is_the_papers(rank: int, size: int, iterations: float, feedback: bool) -> None:
    reference = Reference(rank, feedback, seed=3, halves=iterations == 0.5)
    world = World(PowerSGD(rank, 0, error_feedback=feedback, seed=3, iterations=iterations), size)
    for step in range(6):
        grads = gradients(size, step)
        expected = reference.step([[g.numpy() for g in mine] for mine in grads])
        for ours, theirs in zip(world.step(grads), expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-9)
    held = world.contexts[0].memory.get("residual")
    assert (held is not None and held.any().item()) == feedback
    for segment, compressed in zip(world.buckets[0].segments, reference.compressed, strict=True):
        assert held is None or bool(segment.view(held).any()) == compressed, "what travels whole leaves nothing behind"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rank": 3, "batch_same_shapes": True, "min_compression_rate": 0.4},
        {"granularity": "bucket", "rank": 2},
        {"iterations": 0.5, "rank": 2},
        {"iterations": 1.5, "warm_start": False},
        {"epsilon": 1e-6, "rank": 2, "error_feedback": False},
        {"start_step": 2},
    ],
    ids=str,
)
def test_it_keeps_what_every_compressor_must(settings: dict) -> None:
    check_compressor(PowerSGD(**{"start_step": 0, **settings}), sizes=(1, 3))


@pytest.mark.parametrize("settings", [{}, {"batch_same_shapes": True}, {"warm_start": False}], ids=str)
def test_a_mean_of_low_enough_rank_arrives_exactly(settings: dict) -> None:
    world = World(PowerSGD(rank=3, start_step=0, **settings), size=3)
    for step in range(2):
        grads = gradients(3, step)
        for mine in grads:  # of rank 1, so that the mean has rank 3
            for grad in mine:
                if grad.dim() > 1:
                    grad.view(len(grad), -1).copy_(torch.outer(grad.flatten()[: len(grad)], grad[0].flatten().clone()))
        expected = [torch.stack(parts).mean(0) for parts in zip(*grads, strict=True)]
        for ours, theirs in zip(world.step(grads), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_more_iterations_come_closer_to_the_best_approximation() -> None:
    grads = gradients(2, 0)
    mean = torch.stack([mine[0] for mine in grads]).mean(0)
    best = float(torch.linalg.svdvals(mean)[2:].norm())
    gaps = [
        float((World(PowerSGD(rank=2, start_step=0, iterations=n), 2).step(grads)[0] - mean).norm()) for n in (1, 2, 30)
    ]
    assert gaps[0] > gaps[1] > gaps[2] >= best - 1e-9
    assert gaps[2] == pytest.approx(best, rel=1e-3)


def test_half_an_iteration_sends_each_factor_every_other_step() -> None:
    world = World(PowerSGD(start_step=0, iterations=0.5, min_compression_rate=2.0), 2)
    whole = 7 + 6  # the vector, and the matrix of 3 x 2
    sent = []
    for step in range(3):
        sent.append(world.compressor.payload_bytes(world.contexts[0]) // 8 - whole)
        world.step(gradients(2, step))
    assert sent == [20 + 6 + 20, 15 + 20 + 15, 20 + 6 + 20]


@pytest.mark.parametrize(
    "settings", [{"rank": 1}, {"rank": 2}, {"rank": 2, "epsilon": 1e-8}, {"granularity": "bucket"}], ids=str
)
def test_gradients_come_through_again_after_a_step_of_zeros(settings: dict) -> None:
    world = World(PowerSGD(start_step=0, **settings), 2)
    world.step(gradients(2, 0))
    for context in world.contexts:
        context.memory["residual"].zero_()
    zeros = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]] * 2
    for _ in range(2):
        assert not any(part.any() for part in world.step(zeros))
    assert all(part.isfinite().all() and part.any() for part in world.step(gradients(2, 1)))


def test_dependent_columns_do_not_spoil_the_projection() -> None:
    column = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    basis = orthogonal(torch.cat((column, 2 * column, -column), 1).unsqueeze(0), 0.0)[0]
    torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 1e-320])
def test_columns_with_squares_that_underflow_stay_finite(epsilon: float) -> None:
    tiny = torch.full((1, 5, 1), 1e-300, dtype=torch.float64)
    assert orthogonal(tiny, epsilon).isfinite().all()


def test_first_factors_come_from_the_numbers_that_numpy_draws() -> None:
    for seed in (0, 1, 12345):
        state = np.random.RandomState(seed)
        assert [first_seed(seed, place) for place in range(100)] == [state.randint(1_000_000_000) for _ in range(100)]


def test_a_sum_leaves_the_same_residual_as_an_average() -> None:
    mean, total = World(PowerSGD(start_step=0), 3), World(PowerSGD(start_step=0), 3, op="sum")
    for step in range(3):
        for ours, theirs in zip(total.step(gradients(3, step)), mean.step(gradients(3, step)), strict=True):
            torch.testing.assert_close(ours, 3 * theirs, rtol=0, atol=1e-12)
    assert torch.equal(mean.contexts[1].memory["residual"], total.contexts[1].memory["residual"])


class Training:
    """A network on 2 simulated ranks."""

    def __init__(self, compressor: PowerSGD, bucket_mb: float) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5)).double()
        self.models = [copy.deepcopy(model) for _ in range(2)]
        self.optimizers = [
            dgcopt.DistributedOptimizer(
                torch.optim.SGD(m.parameters(), lr=0.2),
                m.named_parameters(),
                compressor,
                comm=comm,
                bucket_mb=bucket_mb,
                first_bucket_mb=bucket_mb,
            )
            for m, comm in zip(self.models, dgcopt.simulated_world(2), strict=True)
        ]

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(8, 12, generator=generator, dtype=torch.float64)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self, rank: int) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.models[rank].parameters()])


@pytest.mark.parametrize("forgotten", ["nothing", "PowerSGD Q"])
def test_a_resumed_run_continues_with_the_same_bits_in_other_buckets(forgotten: str) -> None:
    compressor = PowerSGD(start_step=0, rank=2)
    straight, resumed = Training(compressor, 25), Training(compressor, 0.001)
    for seed in range(3):
        straight.step(seed)
    for rank in range(2):
        state = straight.optimizers[rank].state_dict()
        state[STATE_KEY]["shared"].pop(forgotten, None)
        resumed.models[rank].load_state_dict(straight.models[rank].state_dict())
        resumed.optimizers[rank].load_state_dict(state)
    for seed in range(3, 6):
        straight.step(seed)
        resumed.step(seed)
    assert torch.equal(resumed.weights(0), resumed.weights(1))
    assert torch.equal(straight.weights(0), resumed.weights(0)) == (forgotten == "nothing")


def test_autocast_around_a_step_does_not_round_its_products() -> None:
    def trained(enabled: bool) -> Tensor:
        params = [nn.Parameter(torch.zeros(20, 15)) for _ in range(2)]
        comms = dgcopt.simulated_world(2)
        optimizers = [
            dgcopt.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), None, PowerSGD(2, start_step=0), comm=comm)
            for param, comm in zip(params, comms, strict=True)
        ]
        for seed, param in enumerate(params):
            (param * torch.randn(20, 15, generator=torch.Generator().manual_seed(seed))).sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled):
            for optimizer in optimizers:
                optimizer.step()
        return params[0].detach()

    assert torch.equal(trained(True), trained(False))


def test_a_channels_last_weight_is_read_where_it_lies() -> None:
    weight = torch.zeros(8, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    comms, buckets = dgcopt.simulated_world(2), [bucket_of([weight]) for _ in range(2)]
    column, row = torch.arange(1.0, 9).double(), torch.arange(1.0, 37).double()
    grad = torch.outer(column, row).view(8, 4, 3, 3)
    for bucket in buckets:
        bucket.fill([0], [grad])
    results = dgcopt.simulate(
        [PowerSGD(start_step=0).exchange(b.grad, context_of(b, r, 2)) for r, b in enumerate(buckets)], comms
    )
    torch.testing.assert_close(buckets[0].segments[0].view(results[0]), grad, rtol=0, atol=1e-9)


def test_rank_0_logs_the_savings_every_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    world = World(PowerSGD(start_step=1, stats_every=2), 2)
    with caplog.at_level(logging.INFO, "dgcopt"):
        for step in range(4):
            world.step(gradients(2, step))
    before, after = 300 + 7 + 120 + 300 + 6, 35 + 7 + 26 + 35 + 6
    assert [record.args for record in caplog.records] == [(s, after, before, 0, before / after) for s in (1, 3)]


@pytest.mark.parametrize(
    "settings",
    [
        *({"rank": 0}, {"rank": 1.5}, {"start_step": -1}, {"iterations": 0.7}, {"iterations": 0}, {"epsilon": -1}),
        *({"min_compression_rate": 0}, {"granularity": "layer"}, {"stats_every": 0}, {"seed": -1}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings: dict) -> None:
    with pytest.raises(dgcopt.ConfigError, match=next(iter(settings))):
        PowerSGD(**settings)
