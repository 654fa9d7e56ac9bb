"""DGC reads gradients in place, writes the mean there, and keeps no further copies."""

import contextlib
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt.collectives import AllReduce
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, small_model
from tests.unit.gradients.test_overlap import odd_gradients


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is so small that it is copied."""
    monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 1)


def held_bytes(optimizer: Optimizer) -> int:
    """All that is kept for its gradients beside them."""
    engine = synchronised(optimizer).engine
    flats = [flat for bucket in engine.layout.buckets for flat in (bucket._sent, bucket._other)]
    tensors = [flat.tensor for flat in flats if flat is not None]
    for context in engine.layout.contexts.values():
        tensors += [*context.memory.values(), *context.memory._spare.values(), *context.memory._next.values()]
        tensors += [value for value in context.scratch.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def wide_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 640, bias=False), nn.Tanh(), nn.Linear(640, 5, bias=False))


@pytest.mark.parametrize("overlap", [False, True], ids=["at the step", "in backward"])
@pytest.mark.parametrize("accumulated", [False, True], ids=["", "zero_grad(set_to_none=False)"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"vectors": "int8", "values": "int2", "indices": "rice"}, {"reduce": "owner", "vectors": "sparse"}],
    ids=["plain", "coded", "owners"],
)
def test_small_gradients_are_copied_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, settings: dict, accumulated: bool, overlap: bool
) -> None:
    """Channels-last, with gaps behind parameters, unused ones among them, momentum, weight decay and a void step."""

    def model() -> nn.Module:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(80, 7), nn.Linear(7, 3), nn.Linear(80, 3))
        return net.to(memory_format=torch.channels_last)

    def train(small: int) -> tuple[list[Tensor], dict, dict]:
        monkeypatch.setattr("dgcopt.flat.gradient.SMALL", small)
        make = functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        compression = dgcopt.DGC(0.1, overlap=overlap, **settings)
        ranks = Ranks(2, make, model, compression=compression, bucket_mb=1e-3, first_bucket_mb=1e-4)
        generator = torch.Generator().manual_seed(5)
        for step in range(6):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad(set_to_none=not accumulated)
            for rank, (conv, flat, wide, narrow, other) in enumerate(ranks.models):
                x = flat(conv(torch.randn(4, 2, 6, 6, generator=generator)))
                (other(x) if (step + rank) % 3 == 0 else narrow(wide(x))).square().mean().backward()
                if step == 3 and rank == 1:
                    conv.weight.grad[0, 0, 0, 0] = torch.nan
            for optimizer in ranks.optimizers:
                optimizer.step()
        (engine, _), in_place = (synchronised(each).engine for each in ranks.optimizers), small == 1
        assert any(bucket.in_place for bucket in engine.layout.buckets) == in_place
        assert engine.telemetry.skipped == 1
        grads = [param.grad for model in ranks.models for param in model.parameters()]
        weights = [weight for rank in range(2) for weight in ranks.weights(rank)]
        return weights + [grad for grad in grads if grad is not None], engine.store.memory(), engine.telemetry

    (mine, memory, told), (copied, copied_memory, copied_told) = train(1), train(2**12)
    assert len(mine) == len(copied) and all(map(torch.equal, mine, copied))
    assert memory.keys() == copied_memory.keys() and any(by_name["0.weight"].any() for by_name in memory.values())
    for kind, by_name in memory.items():
        assert all(torch.equal(held, copied_memory[kind][name]) for name, held in by_name.items()), kind
    assert (told.sent_bytes, told.selected, told.repeated) == (
        copied_told.sent_bytes, copied_told.selected, copied_told.repeated
    )  # fmt: skip


@pytest.mark.parametrize("residual, copies", [("full", 2), ("bf16", 1)])
def test_memory_is_v_and_u(residual: str, copies: float) -> None:
    ranks = Ranks(
        2, lambda p: SGD(p, lr=0.1, momentum=0.9), wide_model, compression=dgcopt.DGC(0.01, residual=residual)
    )
    for seed in range(4):
        ranks.step(seed)
    assert held_bytes(ranks.optimizers[0]) == copies * 4 * (12 * 640 + 640 * 5)


def test_a_residual_of_half_precision_trains_and_continues_from_its_state() -> None:
    """Its rounding is not made up for, but stays small. Its state goes on to the bit, and in full precision."""

    def make(residual: str) -> Ranks:
        compression = dgcopt.DGC(0.1, vectors="int8", residual=residual)
        return Ranks(2, lambda p: SGD(p, lr=0.05, momentum=0.9), compression=compression)

    half, full, resumed, widened = make("bf16"), make("full"), make("bf16"), make("full")
    for seed in range(10):
        half.step(seed)
        full.step(seed)
    start = [param.detach() for param in small_model().parameters()]
    for one, other, first in zip(half.weights(), full.weights(), start, strict=True):
        assert 0 < (one - other).norm() < 0.2 * (other - first).norm()
    for ranks in (resumed, widened):
        for place in range(2):
            ranks.models[place].load_state_dict(half.models[place].state_dict())
            ranks.optimizers[place].load_state_dict(half.optimizers[place].state_dict())
    for ranks in (half, resumed, widened):
        ranks.step(11)
        ranks.assert_replicas_equal()
    for one, other, wide, first in zip(half.weights(), resumed.weights(), widened.weights(), start, strict=True):
        assert torch.equal(one, other)
        assert (one - wide).norm() < 0.2 * (one - first).norm()


def test_a_ratio_per_bucket_lets_tensors_with_larger_gradients_send_more() -> None:
    def counts(granularity: str) -> list[int]:
        model = wide_model()
        comms = dgcopt.simulated_world(2)
        models = [model, wide_model()]
        optimizers = [
            dgcopt.DistributedOptimizer(
                SGD(m.parameters(), lr=0.1), m.named_parameters(), dgcopt.DGC(0.01, granularity=granularity), comm=comm
            )
            for m, comm in zip(models, comms, strict=True)
        ]
        for m in models:
            for scale, param in zip((1.0, 100.0), m.parameters(), strict=True):
                (scale * param * torch.randn_like(param)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return [int(param.grad.count_nonzero()) for param in model.parameters()]

    per_tensor, together = counts("tensor"), counts("bucket")
    assert per_tensor[0] >= 77 and per_tensor[1] >= 32
    assert together[0] == 0 and together[1] >= 109


def test_gradients_stay_the_tensors_that_autograd_made() -> None:
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1, momentum=0.9), compression=dgcopt.DGC(0.1, vectors="sparse"))
    for seed in range(3):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        before = [[param.grad for param in model.parameters()] for model in ranks.models]
        for optimizer in ranks.optimizers:
            optimizer.step()
        for model, grads in zip(ranks.models, before, strict=True):
            assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    means = [[param.grad for param in model.parameters()] for model in ranks.models]
    for one, other in zip(*means, strict=True):
        assert torch.equal(one, other) and 0 < one.count_nonzero() <= 2 * -(-one.numel() // 10)


def wide_enough(order: torch.memory_format = torch.contiguous_format) -> nn.Module:
    """Gradients that are copied at once, as 2^18 elements are, and ones that wait for others."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 8, 2),
        nn.Flatten(),
        nn.Linear(8, 33_000),
        nn.Tanh(),
        nn.Linear(33_000, 5),
    )
    return model.double().to(memory_format=order)


DENSE = [dgcopt.NoCompression(), dgcopt.FP16(), dgcopt.BF16(), dgcopt.PowerSGD(rank=1)]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compression", DENSE, ids=["none", "fp16", "bf16", "powersgd"])
def test_a_dense_gradient_is_one_tensor_from_backward_to_step(compression, set_to_none: bool, order) -> None:
    """And from then on a part of its bucket's flat memory, whatever it was before."""
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1), lambda: wide_enough(order), compression=compression, bucket_mb=0.1)
    before: dict[torch.Tensor, torch.Tensor] = {}
    for seed in range(5):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        ranks.backward(seed)
        grads = [[param.grad for param in model.parameters()] for model in ranks.models]
        local = [[grad.clone() for grad in each] for each in grads]
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        for each, other, model in zip(grads, local, ranks.models, strict=True):
            for param, grad, own in zip(model.parameters(), each, other, strict=True):
                assert param.grad is grad and grad.stride() == param.stride()
                assert not torch.equal(grad, own), "it holds what the ranks agree upon"
                assert set_to_none or before.setdefault(param, grad) is grad
        for optimizer in ranks.optimizers:
            for bucket in synchronised(optimizer).engine.layout.buckets:
                for segment in bucket.segments:
                    there = segment.param.grad.data_ptr() - bucket.grad.data_ptr()
                    assert isinstance(compression, dgcopt.PowerSGD) or there == segment.start * 8
            with optimizer.skip_synchronize():
                optimizer.step()
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_dense_gradients_of_their_own_outlive_what_was_sent_too_early(set_to_none: bool) -> None:
    """More passes than usual, clipping, and NaN on one rank: all after buckets have left."""
    size, model = 2, wide_enough
    ranks = Ranks(size, lambda p: SGD(p, lr=0.1), model, bucket_mb=0.1)
    alone = [model() for _ in range(size)]
    for seed in range(12):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        kind = ("plain", "plain", "twice", "clipped", "plain", "void")[seed % 6]
        for replica, ours in zip(alone, ranks.models, strict=True):
            replica.load_state_dict(ours.state_dict())
            replica.zero_grad()
        passes = [seed, seed + 50] if kind == "twice" else [seed]
        for each in passes:
            ranks.backward(each)
            Ranks.backward(SimpleNamespace(models=alone), each)  # type: ignore[arg-type]
        for model_of in (ranks.models, alone):
            for replica in model_of if kind == "clipped" else ():
                nn.utils.clip_grad_norm_(replica.parameters(), 0.01)
        if kind == "void":
            ranks.models[1][3].weight.grad[7, 1] = torch.inf
        weights, own = ranks.weights(), [[p.grad.clone() for p in m.parameters()] for m in ranks.models]
        for optimizer in ranks.optimizers:
            optimizer.step()
        if kind == "void":
            assert [synchronised(optimizer).engine.gradients.infinite for optimizer in ranks.optimizers] == [[1], [1]]
            torch.testing.assert_close(ranks.weights(), weights, rtol=0, atol=0)
            kept = [[p.grad for p in m.parameters()] for m in ranks.models]
            torch.testing.assert_close(kept, own, rtol=0, atol=0)
            continue
        means = [sum(grads) / size for grads in zip(*([p.grad for p in m.parameters()] for m in alone), strict=True)]
        for replica in ranks.models:
            torch.testing.assert_close([p.grad for p in replica.parameters()], means, rtol=1e-12, atol=1e-15)
    assert all(optimizer.telemetry.repeated for optimizer in ranks.optimizers)


@pytest.mark.parametrize("compression", [None, dgcopt.FP16(), dgcopt.BF16()], ids=["none", "fp16", "bf16"])
def test_dense_gradients_are_divided_before_they_are_sent(compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are copied: a pass over all of them for it, before or after, would be one more."""
    sent: list[AllReduce] = []
    start = dgcopt.Comm.start
    monkeypatch.setattr(dgcopt.Comm, "start", lambda comm, what: (sent.append(what), start(comm, what))[1])
    ranks = Ranks(4, lambda p: SGD(p, lr=0.1), compression=compression)
    for seed in range(3):
        sent.clear()
        ranks.step(seed)
    gradients = [each for each in sent if isinstance(each, AllReduce) and "bucket" in each.label]
    assert len(gradients) == 4 and {each.op for each in gradients} == {"sum"}
    memory = {each.tensor.data_ptr() for each in gradients}
    sent.clear()
    ranks.step(3)
    again = {each.tensor.data_ptr() for each in sent if isinstance(each, AllReduce) and "bucket" in each.label}
    assert again == memory, "the same memory carries every step"


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)])
@pytest.mark.parametrize("void", [False, True])
def test_gradients_are_gone_once_they_are_set_to_none(make, void: bool) -> None:
    """Nothing of ours keeps them: that would be one more copy of the parameters while the next ones are computed."""
    ranks = Ranks(2, make, compression=dgcopt.DGC(0.1, vectors="sparse"))
    for seed in range(3):
        ranks.step(seed)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(3)
    if void:
        ranks.models[0][0].weight.grad[0, 0] = torch.nan
    grads = [weakref.ref(param.grad) for model in ranks.models for param in model.parameters()]
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert all(grad() is not None for grad in grads)
    # an alias of one would not be seen below
    assert all(
        bucket._local is None
        for optimizer in ranks.optimizers
        for bucket in synchronised(optimizer).engine.layout.buckets
    )
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    assert all(grad() is None for grad in grads)


@pytest.mark.parametrize("adds_up", [True, False])
def test_memory_of_large_gradients_is_freed_one_by_one_while_the_next_are_made(adds_up: bool) -> None:
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1), wide_enough, bucket_mb=0.1)
    large = [model[3].weight for model in ranks.models]
    before: list[StorageWeakRef] = []
    for seed in range(4):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        assert not any(memory.expired() for memory in before)
        if adds_up:
            with contextlib.ExitStack() as stack:
                for optimizer in ranks.optimizers:
                    stack.enter_context(optimizer.no_sync())
                ranks.backward(seed + 10)
        else:
            ranks.backward(seed)
        assert all(memory.expired() for memory in before)
        if adds_up:
            ranks.backward(seed)
        before = [StorageWeakRef(param.grad.untyped_storage()) for param in large]
        for optimizer in ranks.optimizers:
            optimizer.step()


def test_gradients_that_lie_otherwise_or_are_missing() -> None:
    worlds = [
        Ranks(2, lambda p: SGD(p, lr=0.1, momentum=0.9), compression=dgcopt.DGC(0.1, vectors="sparse"))
        for _ in range(2)
    ]
    for seed in range(4):
        for ranks in worlds:
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
        odd_gradients(worlds[0].optimizers[0])
        like = list(worlds[1].models[0].parameters())
        like[2].grad = torch.zeros_like(like[2])
        like[3].grad = torch.full_like(like[3], like[3].grad[0])
        for ranks in worlds:
            for optimizer in ranks.optimizers:
                optimizer.step()
            ranks.assert_replicas_equal()
    for one, other in zip(worlds[0].weights(), worlds[1].weights(), strict=True):
        assert torch.equal(one, other)


def test_parameters_of_all_memory_orders() -> None:
    """Channels-last and transposed weights, and one that is a part of something larger, train as contiguous ones do."""

    def make(contiguous: bool) -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 6), nn.Linear(6, 5)).double()
        wide, tall = 0.1 * torch.randn(6, 64, dtype=torch.float64), 0.1 * torch.randn(6, 5, dtype=torch.float64)
        for layer, weight in ((2, wide[:, ::2]), (3, tall.t())):
            model[layer].weight = nn.Parameter(weight.contiguous() if contiguous else weight)
        return model if contiguous else model.to(memory_format=torch.channels_last)

    def train(contiguous: bool) -> list[torch.Tensor]:
        models = [make(contiguous) for _ in range(2)]
        optimizers = [
            dgcopt.DistributedOptimizer(
                SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(), dgcopt.DGC(0.1), comm=comm
            )
            for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
        ]
        for step in range(6):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                torch.manual_seed(10 * step + rank)
                inputs = torch.randn(4, 3, 4, 4, dtype=torch.float64)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), inputs.flatten(1)[:, :5]).backward()
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, other)
        return list(models[0].parameters())

    for odd, plain, start in zip(train(False), train(True), make(True).parameters(), strict=True):
        torch.testing.assert_close(odd, plain, rtol=1e-9, atol=1e-12)
        assert not torch.equal(odd, start)


def test_a_compressor_of_ones_own_may_return_a_sparse_sum() -> None:
    class First(dgcopt.Compressor):
        """Each rank sends the first coordinate of every bucket."""

        def exchange(self, grad, ctx):
            rows = yield dgcopt.collectives.AllGather(grad[:1].clone())
            total = dgcopt.SparseSum()
            for row in rows:
                total.add(torch.zeros(1, dtype=torch.int64), row / ctx.divisor)
            return total

    def means(predivide: float) -> list[torch.Tensor]:
        ranks = Ranks(3, torch.optim.Adam, compression=First(), gradient_predivide_factor=predivide)
        ranks.step()
        ranks.assert_replicas_equal()
        return [param.grad for param in ranks.models[0].parameters()]

    assert [grad.count_nonzero().item() for grad in means(1.0)].count(0) == 5
    for one, other in zip(means(1.0), means(4.0), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_voids_the_step_everywhere(value: float) -> None:
    """Nobody sums gradients up that stay in place: the largest magnitude that the exchange meets tells."""
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1, momentum=0.9), compression=dgcopt.DGC(0.1, vectors="sparse"))
    for seed in range(3):
        ranks.step(seed)
    before = ranks.weights(), [synchronised(optimizer).engine.store.memory() for optimizer in ranks.optimizers]
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    hook = ranks.models[1][2].weight.register_hook(lambda grad: grad.index_fill(1, torch.tensor([7]), value))
    ranks.backward(3)
    hook.remove()
    grads = [[param.grad.clone() for param in model.parameters()] for model in ranks.models]
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]
    after = ranks.weights(), [synchronised(optimizer).engine.store.memory() for optimizer in ranks.optimizers]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    for model, untouched in zip(ranks.models, grads, strict=True):
        torch.testing.assert_close([p.grad for p in model.parameters()], untouched, rtol=0, atol=0, equal_nan=True)
    ranks.step(4)
    ranks.assert_replicas_equal()
    assert not torch.equal(ranks.weights()[0], before[0][0])
