"""QAdam and 1-bit Adam against their rules, written anew in NumPy for N workers."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

import dgcopt
from dgcopt.compressors import (
    ByteGrad,
    Memory,
    NoCompression,
    OneBitAdam,
    OneBitReduce,
    Place,
    PowerSGD,
    QAdam,
    Wrapper,
)
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.gradients.synchronised import synchronised
from dgcopt.testing import check_compressor

SHAPES = [(5, 13), (7,), (70, 3), (1,)]
GROUPS = [
    {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-6},
    {"lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-8},
]
"""Of the first two parameters, and of the others."""


def gradients(size: int, step: int) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(step)
    return [[0.5 + generator.standard_normal(shape) for shape in SHAPES] for _ in range(size)]


def lr_at(step: int, base: float) -> float:
    return base * (1 + 0.5 * math.sin(step))


class Workers:
    """N simulated ranks, whose gradients are given."""

    def __init__(self, compressor: Any, make: type = Adam, size: int = 3, **settings: Any) -> None:
        torch.manual_seed(0)
        start = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
        self.params = [[torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(size)]
        self.optimizers = []
        for params, comm in zip(self.params, dgcopt.simulated_world(size), strict=True):
            parts = [params[:2], params[2:]]
            optimizer = make([{**group, "params": part} for group, part in zip(GROUPS, parts, strict=True)])
            self.optimizers.append(dgcopt.DistributedOptimizer(optimizer, None, compressor, comm=comm, **settings))

    def step(self, step: int) -> None:
        for params, optimizer, grads in zip(
            self.params, self.optimizers, gradients(len(self.params), step), strict=True
        ):
            optimizer.zero_grad()
            for group, base in zip(optimizer.param_groups, GROUPS, strict=True):
                group["lr"] = lr_at(step, base["lr"])
            sum((p * torch.from_numpy(g)).sum() for p, g in zip(params, grads, strict=True)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for params in self.params[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(params, self.params[0], strict=True))

    def weights(self) -> list[np.ndarray]:
        return [param.detach().numpy().copy() for param in self.params[0]]


def reference(steps: int, warmup: int, rule: str, decoupled: bool = False, size: int = 3) -> list[np.ndarray]:
    """Weights after so many steps with the mean momentum known exactly; rules are "ours" and "bagua"."""
    torch.manual_seed(0)
    weights = [torch.randn(shape, dtype=torch.float64).numpy() for shape in SHAPES]
    ms, vs = [np.zeros(shape) for shape in SHAPES], [np.zeros(shape) for shape in SHAPES]
    for k in range(1, steps + 1):
        grads = gradients(size, k - 1)
        for i, x in enumerate(weights):
            group = GROUPS[0 if i < 2 else 1]
            (b1, b2), decay, lr = group["betas"], group["weight_decay"], lr_at(k - 1, group["lr"])
            frozen, lost = k > warmup, rule == "bagua" and k == warmup
            if rule == "bagua" and frozen:
                b1_of_m, decay = GROUPS[0]["betas"][0], 0.0
            else:
                b1_of_m = b1
            local = [b1_of_m * ms[i] + (1 - b1_of_m) * worker[i] for worker in grads]
            if not lost:
                coupled = 0.0 if decoupled else decay * x
                ms[i] = np.mean(local, 0) + (1 - b1_of_m) * coupled
                if not frozen:
                    vs[i] = b2 * vs[i] + (1 - b2) * (np.mean([worker[i] for worker in grads], 0) + coupled) ** 2
            if decoupled:
                x *= 1 - lr * decay
            counted = k if rule == "bagua" else min(k, warmup)
            spread = np.sqrt(vs[i]) / np.sqrt(1 - b2**counted) + group["eps"]
            x -= lr / (1 - b1**k) * ms[i] / spread
    return weights


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float = 1e-10) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("warmup", [1, 3, 7])
@pytest.mark.parametrize("make", [Adam, AdamW])
def test_the_rule_is_adams_with_its_variance_frozen_after_the_warm_up(make: type, warmup: int) -> None:
    workers = Workers(QAdam(warmup, NoCompression()), make)
    for step in range(12):
        workers.step(step)
        assert_close(workers.weights(), reference(step + 1, warmup, "ours", make is AdamW))


@pytest.mark.parametrize("warmup", [2, 5])
def test_faithful_is_bagua_with_its_lost_gradient_and_its_shrinking_denominator(warmup: int) -> None:
    workers = Workers(QAdam(warmup, NoCompression(), faithful=True))
    for step in range(12):
        workers.step(step)
        assert_close(workers.weights(), reference(step + 1, warmup, "bagua"))
    apart = max(np.abs(a - b).max() for a, b in zip(workers.weights(), reference(12, warmup, "ours"), strict=True))
    assert apart > 1e-3


@pytest.mark.parametrize("op", ["sum", "average"])
def test_the_momentum_of_a_sum_is_the_sums(op: str) -> None:
    total, mean = Workers(QAdam(2, NoCompression()), op="sum"), Workers(QAdam(2, NoCompression()))
    for step in range(5):
        total.step(step)
        mean.step(step)
    for ours, theirs in zip(total.params[0][2:], mean.params[0][2:], strict=True):  # those without weight decay
        m, n = (w.optimizers[0].state[p]["exp_avg"] for w, p in ((total, ours), (mean, theirs)))
        torch.testing.assert_close(m, 3 * n, rtol=1e-12, atol=0)


@pytest.mark.parametrize("compressor", [QAdam(50), OneBitAdam(50), QAdam(50, faithful=True)], ids=str)
@pytest.mark.parametrize("make", [Adam, AdamW])
def test_a_warm_up_longer_than_the_run_is_the_bare_optimizer(make: type, compressor: QAdam) -> None:
    size = 4  # by which dividing before the sum and after it is the same to the bit
    ours, bare = Workers(compressor, make, size), Workers(None, make, size)
    for step in range(8):
        ours.step(step)
        bare.step(step)
    assert all(torch.equal(a, b) for a, b in zip(ours.params[0], bare.params[0], strict=True))


@pytest.mark.parametrize("compressor", [QAdam(4), QAdam(4, ByteGrad(error_feedback=True))], ids=str)
def test_momentum_in_8_bits_is_within_a_level_of_the_mean(compressor: QAdam) -> None:
    workers, exact = Workers(compressor), Workers(QAdam(4, NoCompression()))
    for step in range(5):
        workers.step(step)
        exact.step(step)
    optimizers = workers.optimizers[0], exact.optimizers[0]
    ours, theirs = (
        torch.cat([o.state[p]["exp_avg"].flatten() for g in o.param_groups for p in g["params"]]) for o in optimizers
    )
    gap, level = float((ours - theirs).abs().max()), 8 / 255  # the local momenta, of both roundings, span less than 8
    assert 1e-6 < gap < level


@pytest.mark.parametrize("compressor", [QAdam(2), OneBitAdam(2)], ids=str)
def test_bytes_after_the_warm_up_are_those_declared(compressor: QAdam) -> None:
    workers, counts = Workers(compressor, size=2), []
    for step in range(4):
        before = workers.optimizers[0].telemetry.payload_bytes
        workers.step(step)
        counts.append(workers.optimizers[0].telemetry.payload_bytes - before)
    whole = 64 * 8 * sum(-(-math.prod(shape) // 64) for shape in SHAPES)
    (context,) = synchronised(workers.optimizers[0]).engine.layout.contexts.values()
    saved = whole - workers.optimizers[0].compressor.payload_bytes(context)
    assert counts[1] - counts[2] == counts[1] - counts[3] == saved > whole / 2


@pytest.mark.parametrize("compressor", [QAdam(3), OneBitAdam(3), QAdam(3, faithful=True)], ids=str)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_state_dict_continues_with_the_same_bits(compressor: QAdam, at: int) -> None:
    """Also of those keys alone that are there after one step, as torch.distributed.checkpoint loads it."""
    straight, resumed = Workers(compressor), Workers(compressor)
    for step in range(at):
        straight.step(step)
    resumed.step(0)
    for rank in range(3):
        for mine, theirs in zip(resumed.params[rank], straight.params[rank], strict=True):
            mine.data.copy_(theirs.data)
        state = copy.deepcopy(straight.optimizers[rank].state_dict())
        for number, made in resumed.optimizers[rank].state_dict()["state"].items():
            state["state"][number] = {key: state["state"][number][key] for key in made}
        resumed.optimizers[rank].load_state_dict(state)
    for step in range(at, 9):
        straight.step(step)
        resumed.step(step)
    assert all(torch.equal(a, b) for a, b in zip(straight.params[0], resumed.params[0], strict=True))


def test_a_run_that_adam_began_keeps_the_bias_correction_of_its_variance() -> None:
    """v of 6 steps counts as such, though the warm-up is of 2."""
    adam, ours = Workers(None), Workers(QAdam(2, NoCompression()))
    for step in range(6):
        adam.step(step)
    for rank in range(3):
        state = adam.optimizers[rank].state_dict()
        for mine, theirs in zip(ours.params[rank], adam.params[rank], strict=True):
            mine.data.copy_(theirs.data)
        ours.optimizers[rank].load_state_dict({key: state[key] for key in ("state", "param_groups")})
    for step in range(6, 9):
        ours.step(step)
    assert_close(ours.weights(), reference(9, 6, "ours"))


def test_a_step_with_nan_leaves_moments_and_steps_as_they_were() -> None:
    plain, disturbed = Workers(OneBitAdam(2)), Workers(OneBitAdam(2))
    for step in range(6):
        plain.step(step)
        for rank, (params, optimizer) in enumerate(zip(disturbed.params, disturbed.optimizers, strict=True)):
            optimizer.zero_grad()
            sum((p * (torch.nan if rank == 1 else 1.0)).sum() for p in params).backward()
        for optimizer in disturbed.optimizers:
            optimizer.step()
        disturbed.step(step)
    assert all(torch.equal(a, b) for a, b in zip(plain.params[0], disturbed.params[0], strict=True))


def test_a_coordinate_without_a_gradient_in_the_warm_up_stays_where_it_is() -> None:
    """Its variance is zero, and one bit of momentum over nothing but eps would throw it far away."""
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(2)]
    optimizers = [
        dgcopt.DistributedOptimizer(Adam([p], lr=0.01), None, OneBitAdam(2), comm=comm)
        for p, comm in zip(params, dgcopt.simulated_world(2), strict=True)
    ]
    mask = (torch.arange(100) % 2).float()
    for _ in range(6):
        for param, optimizer in zip(params, optimizers, strict=True):
            optimizer.zero_grad()
            (param * mask).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(params[0][::2], torch.ones(50)) and (params[0][1::2] < 0.97).all()


@pytest.mark.parametrize("lies", ["in rows", "channels last", "otherwise"])
@pytest.mark.parametrize("make", [Adam, AdamW])
def test_the_step_in_parts_that_fit_into_a_cache_is_that_of_the_whole(make: type[Adam], lies: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(3, 100, 30, 30) for _ in range(4)]  # more than one part, and a rest
    if lies == "channels last":
        weights = [x.to(memory_format=torch.channels_last) for x in weights]
    x, grad, m, v = weights
    if lies == "otherwise":
        grad = grad.transpose(2, 3)
    v.square_().masked_fill_(v > 3, 0)
    param, start = torch.nn.Parameter(x.clone()), x.clone()
    optimizer = make([param], lr=0.1, weight_decay=0.25, eps=0.0)
    optimizer.state[param] = {"step": torch.tensor(7.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    compressor = OneBitAdam(2)
    compressor.attach(optimizer)
    param.grad = grad.clone()
    assert list(compressor.before_step(optimizer)) == [param]

    if make is AdamW:
        start *= 1 - 0.1 * 0.25
    else:
        grad = grad + 0.25 * start
    mean = m.lerp(grad, 1 - 0.9)
    update = torch.where(v == 0, 0, mean / (v / (1 - 0.999**7)).sqrt())
    assert torch.equal(optimizer.state[param]["exp_avg"], mean)
    assert torch.equal(param, start.sub(update, alpha=0.1 / (1 - 0.9**8)))


def naive_one_bit_reduce(
    grads: list[list[np.ndarray]], errors: list, server: list, cuts: list[slice]
) -> list[np.ndarray]:
    """On flat gradients of each tensor; `cuts` are the servers' parts of the bucket laid out on blocks of 64."""
    places, start = [], 0
    for grad in grads[0]:
        places.append(np.arange(start, start + len(grad)))
        start += -(-len(grad) // 64) * 64

    def one_bit(parts: list[np.ndarray]) -> list[np.ndarray]:
        return [np.where(p < 0, -1.0, 1.0) * np.float64(np.float32(np.abs(p).mean() if len(p) else 0)) for p in parts]

    sent = []
    for rank, mine in enumerate(grads):
        v = [g + e for g, e in zip(mine, errors[rank], strict=True)]
        sent.append(one_bit(v))
        errors[rank] = [a - b for a, b in zip(v, sent[-1], strict=True)]
    means = [np.mean([s[i] for s in sent], 0) + server[i] for i in range(len(grads[0]))]
    results = [np.empty_like(mean) for mean in means]
    for cut in cuts:
        here = [(cut.start <= place) & (place < cut.stop) for place in places]
        for i, part in enumerate(one_bit([mean[h] for mean, h in zip(means, here, strict=True)])):
            results[i][here[i]] = part
    for i, mean in enumerate(means):
        server[i] = mean - results[i]
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_one_bit_reduce_is_its_rule(size: int) -> None:
    tensors = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    buckets = [
        build_buckets(
            [(f"{i}", t) for i, t in enumerate(tensors)], lambda *_: None, 2**40, 2**40, None, GradientBucket
        )[0]
    ] * size
    buckets = [copy.copy(bucket) for bucket in buckets]
    contexts = [
        dgcopt.Context(Place(r, size, "average", 0, None, b.segments), Memory(b.segments))
        for r, b in enumerate(buckets)
    ]
    blocks = sum(-(-math.prod(shape) // 64) for shape in SHAPES)
    length = 64 * -(-blocks // size)
    cuts = [slice(length * rank, length * (rank + 1)) for rank in range(size)]
    errors, server = [[0.0] * len(SHAPES) for _ in range(size)], [0.0] * len(SHAPES)
    for step in range(6):
        grads = [[grad.ravel() for grad in mine] for mine in gradients(size, step)]
        flat = [torch.zeros(64 * blocks, dtype=torch.float64) for _ in range(size)]
        for here, mine in zip(flat, grads, strict=True):
            for segment, grad in zip(buckets[0].segments, mine, strict=True):
                here[segment.start : segment.stop] = torch.from_numpy(grad)
        exchanges = [OneBitReduce().exchange(g, c) for g, c in zip(flat, contexts, strict=True)]
        results: list[Tensor] = dgcopt.simulate(exchanges, dgcopt.simulated_world(size))
        for context in contexts:
            context.commit()
        for place, expected in enumerate(naive_one_bit_reduce(grads, errors, server, cuts)):
            segment = buckets[0].segments[place]
            for result in results:
                np.testing.assert_allclose(result[segment.start : segment.stop], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("shapes", [[(8, 64), (5, 64)], SHAPES], ids=["no gaps", "gaps"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("make", "inner"), [(OneBitAdam, OneBitReduce()), (QAdam, ByteGrad())], ids=str)
def test_momentum_is_mixed_where_it_is_read_to_the_same_bits(
    make: Any, inner: Any, size: int, shapes: list[tuple[int, ...]], op: str
) -> None:
    """As in passes of their own before and after, which other compressors need."""
    assert inner.mixes and not Wrapper(inner).mixes
    runs = []
    for compressor in (make(1, inner), make(1, Wrapper(inner))):
        torch.manual_seed(0)
        start, seen = [torch.randn(shape) for shape in shapes], []
        ranks = []
        for comm in dgcopt.simulated_world(size):
            params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
            ranks.append((params, dgcopt.DistributedOptimizer(Adam(params), None, compressor, comm=comm, op=op)))
        for _ in range(4):
            for params, optimizer in ranks:
                optimizer.zero_grad()
                sum((param * torch.randn_like(param)).sum() for param in params).backward()
            for _, optimizer in ranks:
                optimizer.step()
            seen += [tensor.detach().clone() for params, _ in ranks for p in params for tensor in (p, p.grad)]
        runs.append(seen)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*runs, strict=True))


def test_residuals_of_parts_no_longer_served_are_sent_with_the_servers_own() -> None:
    """Whether or not the step that finds it succeeds."""
    param = torch.nn.Parameter(torch.zeros(128))
    (bucket,) = build_buckets([("w", param)], lambda *_: None, 2**40, 2**40, None, GradientBucket)
    contexts = [
        dgcopt.Context(Place(rank, 2, "average", 0, None, bucket.segments), Memory(bucket.segments))
        for rank in range(2)
    ]
    contexts[0].memory.put("residual of the server", torch.arange(128.0))
    total = torch.zeros(128)
    for succeeds in (False, True, True, True):
        exchanges = [OneBitReduce().exchange(torch.zeros(128), context) for context in contexts]
        mean, _ = dgcopt.simulate(exchanges, dgcopt.simulated_world(2))
        for context in contexts:
            context.commit() if succeeds else context.rollback()
        total += mean if succeeds else 0
        assert not contexts[0].memory["residual of the server"][64:].any()
        left = sum(held for context in contexts for held in context.memory.values())
        torch.testing.assert_close(2 * total + left, torch.arange(128.0))


@pytest.mark.parametrize("compressor", [OneBitReduce(), OneBitAdam(2), QAdam(2), QAdam(2, faithful=True)], ids=str)
def test_it_keeps_what_every_compressor_must(compressor: Any) -> None:
    check_compressor(compressor, lambda params: AdamW(params, lr=0.01, eps=1e-3), sizes=(1, 2, 5))  # 1e-8 is 0 in fp16


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "SGD"),
        (lambda params: Adam(params, amsgrad=True), "amsgrad"),
        (lambda params: AdamW(params, maximize=True), "maximize"),
    ],
)
def test_optimizers_that_it_cannot_step_for_are_refused(make: Any, named: str) -> None:
    comm, param = dgcopt.simulated_world(2)[0], torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(dgcopt.ConfigError, match=named):
        dgcopt.DistributedOptimizer(make([param]), None, QAdam(), comm=comm)


def test_a_group_that_it_cannot_step_for_is_refused() -> None:
    comm, params = dgcopt.simulated_world(2)[0], [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer: Any = dgcopt.DistributedOptimizer(Adam(params[:1]), None, QAdam(), comm=comm)
    with pytest.raises(dgcopt.ConfigError, match="amsgrad"):
        optimizer.add_param_group({"params": params[1:], "amsgrad": True})


@pytest.mark.parametrize("make", [lambda: QAdam(0), lambda: OneBitAdam(1.5), lambda: QAdam(1, faithful=True)])
def test_a_warm_up_that_leaves_no_variance_is_refused(make: Any) -> None:
    with pytest.raises(dgcopt.ConfigError, match="warmup_steps"):
        make()


def test_momentum_may_travel_by_any_compressor() -> None:
    workers = Workers(QAdam(2, PowerSGD(start_step=0, rank=4)))
    for step in range(8):
        workers.step(step)
    assert all(np.isfinite(weight).all() for weight in workers.weights())


def test_a_parameter_used_after_the_warm_up_has_one_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Its variance is then Adam's own: in signs all elements would have one magnitude, and v would keep it."""

    def variance(compressor: Any) -> Tensor:
        scales = 10.0 ** torch.linspace(-3, 1, 30)
        params = [{name: torch.nn.Parameter(torch.zeros(30)) for name in "ab"} for _ in range(2)]
        optimizers: list[Any] = [
            dgcopt.DistributedOptimizer(Adam(p.values()), p.items(), compressor, comm=comm)
            for p, comm in zip(params, dgcopt.simulated_world(2), strict=True)
        ]
        for step in range(10):
            for mine, optimizer in zip(params, optimizers, strict=True):
                optimizer.zero_grad()
                sum((mine[name] * scales).sum() for name in ("a", "b") if name == "a" or step >= 5).backward()
            for optimizer in optimizers:
                optimizer.step()
        variance: Tensor = optimizers[0].state[params[0]["b"]]["exp_avg_sq"]
        return variance

    scale = 1 - 0.999**3
    torch.testing.assert_close(variance(dgcopt.OneBitAdam(3)), scale * 100.0 ** torch.linspace(-3, 1, 30))
    told = [record.getMessage() for record in caplog.records if "requires_grad=False" in record.getMessage()]
    assert len(told) == 2 and all("'b' had no gradient" in words for words in told), "once on each rank"


def test_the_compressor_inside_is_a_copy() -> None:
    inner = dgcopt.TopK(0.1)
    dgcopt.OneBitAdam(3, inner)
    assert inner.source == "auto"
