"""FP16, BF16 and Hierarchical around any compressor, on machines of equal and of different sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, Collective
from dgcopt.comm.simulated import SimulatedComm, _comms, simulate
from dgcopt.compressors import Compressor, Context, GradientExchange, Memory, Place, Wrapper
from dgcopt.flat.gradient import SparseSum
from tests.support.worlds import bucket_of

SIZES = (1, 7, 64, 65, 300)
MACHINES = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 1, 1, 1, 1, 2), (0, 1, 0, 1, 0)]
"""The machine of each rank."""


class World:
    """One bucket on every rank of some machines, and what its compressor sends."""

    def __init__(self, compressor: Compressor, node_of=(0, 0), dtype=torch.float32, op="average") -> None:
        self.compressor, self.comms = compressor, _comms(node_of)
        self.buckets = [bucket_of([torch.zeros(n, dtype=dtype) for n in SIZES]) for _ in self.comms]
        self.contexts = [
            Context(
                Place(c.rank, c.size, op, 0, None, b.segments, 0, c.node, c.nodes, c.local_rank, c.local_size),
                Memory(b.segments),
            )
            for c, b in zip(self.comms, self.buckets, strict=True)
        ]
        self.sent: list[list[tuple[str, str, torch.dtype, int]]] = [[] for _ in self.comms]

    def flat(self, whole: Tensor) -> Tensor:
        flat = self.buckets[0].empty()
        for segment, part in zip(self.buckets[0].segments, whole.split(list(SIZES)), strict=True):
            flat[segment.start : segment.stop] = part
        return flat

    def whole(self, flat: Tensor) -> Tensor:
        return torch.cat([flat[s.start : s.stop] for s in self.buckets[0].segments])

    def step(self, grads: list[Tensor]) -> Tensor:
        """The result of one step, which has the same bits on all ranks."""
        self.sent = [[] for _ in self.comms]
        exchanges = [
            watched(self.compressor.exchange(self.flat(grad), ctx), sent)
            for grad, ctx, sent in zip(grads, self.contexts, self.sent, strict=True)
        ]
        results = []
        for ctx, result in zip(self.contexts, simulate(exchanges, self.comms), strict=True):
            ctx.commit()
            ctx.begin(ctx.step + 1)
            dense = result.add_to(self.buckets[0].empty()) if isinstance(result, SparseSum) else result
            results.append(self.whole(dense))
        assert all(torch.equal(result, results[0]) for result in results)
        return results[0]


def watched(exchange: GradientExchange, sent: list) -> GradientExchange:
    result = None
    while True:
        try:
            c: Collective = exchange.send(result)
        except StopIteration as stop:
            return stop.value
        sent.append((type(c).__name__, c.group, c.tensor.dtype, c.nbytes))
        result = yield c


def gradients(ranks: int, step: int = 0, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * ranks + step)
    return [torch.randn(sum(SIZES), generator=generator).to(dtype) for _ in range(ranks)]


class Chosen(Compressor):
    """Sends the norms of chunks to agree on the larger half of them, then these; counts in whole numbers as it goes."""

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        rows = grad.view(-1, 64)
        norms = yield AllReduce(rows.abs().sum(1), op="sum")
        chosen = norms.topk(-(-len(rows) // 2)).indices.sort().values
        counts = yield AllReduce(torch.ones(3, dtype=torch.int64), op="sum")
        assert counts.tolist() == [ctx.size] * 3
        result = torch.zeros_like(rows)
        result[chosen] = yield AllReduce(rows[chosen].clone(), op=ctx.op)
        return result.view(-1)


@pytest.mark.parametrize(("wrapper", "half"), [(dgcopt.FP16, torch.float16), (dgcopt.BF16, torch.bfloat16)])
class TestHalf:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    @pytest.mark.parametrize("op", ["average", "sum"])
    def test_around_nothing_it_adds_up_what_each_rank_has_divided_and_rounded(self, wrapper, half, ranks, op) -> None:
        grads = gradients(ranks)
        total = torch.zeros(sum(SIZES))
        for grad in grads:
            total += (grad / ranks if op == "average" else grad).to(half).float()
        world = World(wrapper(), (0,) * ranks, op=op)
        assert torch.equal(world.step(grads), total.to(half).float())
        nbytes = 2 * world.buckets[0].numel
        assert world.sent[0] == [("AllReduce", "world", half, nbytes)]
        assert wrapper().payload_bytes(world.contexts[0]) == nbytes

    def test_messages_of_bytes_stay_as_they_are(self, wrapper, half) -> None:
        plain, wrapped = World(dgcopt.TopK(0.1), (0, 0, 0)), World(wrapper(dgcopt.TopK(0.1)), (0, 0, 0))
        for step in range(3):
            grads = gradients(3, step)
            assert torch.equal(wrapped.step(grads), plain.step(grads))
            assert wrapped.sent == plain.sent

    def test_only_floats_of_many_rounds_are_rounded(self, wrapper, half) -> None:
        world, grads = World(wrapper(Chosen()), (0, 0, 0)), gradients(3)
        result = world.step(grads)
        assert [dtype for _, _, dtype, _ in world.sent[0]] == [half, torch.int64, half]
        exact = World(Chosen(), (0, 0, 0)).step(grads)
        assert torch.equal(result != 0, exact != 0) and not torch.equal(result, exact)
        torch.testing.assert_close(result, exact, rtol=0.02, atol=0.02)

    def test_a_mean_within_a_machine_divides_by_its_ranks(self, wrapper, half) -> None:
        class Mean(Compressor):
            def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
                node = yield AllReduce(grad, op="average", group="node")
                return (yield AllReduce(node, op="average", group="across"))

        world = World(wrapper(Mean()), (0, 0, 0, 1, 1, 1))
        result = world.step([torch.full((sum(SIZES),), 4.0)] * 6)
        torch.testing.assert_close(result, torch.full_like(result, 4.0), rtol=0.01, atol=0)

    def test_settings_and_needs_are_those_of_the_inner_one(self, wrapper, half) -> None:
        inner = dgcopt.DGC(0.1, clip=dgcopt.LocalClip(1.0, per="model"), overlap=False)
        outer = wrapper(inner)
        assert outer.whole_model and not outer.overlap and outer.kind("", torch.zeros(3)) == "vector"
        outer.attach(torch.optim.AdamW([torch.zeros(3)]))
        assert outer.sends == inner.sends == "update"
        assert repr(outer) == f"{wrapper.__name__}({inner!r})"


@pytest.mark.parametrize("node_of", MACHINES, ids=str)
class TestHierarchical:
    @pytest.mark.parametrize("op", ["average", "sum"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_around_nothing_it_is_the_mean_over_ranks(self, node_of, op, dtype) -> None:
        ranks, grads = len(node_of), gradients(len(node_of), dtype=dtype)
        mean = sum(grad.double() for grad in grads) / ranks
        result = World(dgcopt.Hierarchical(), node_of, dtype, op).step(grads)
        near = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.03}[dtype]
        torch.testing.assert_close(result.double(), mean * (ranks if op == "sum" else 1), rtol=near, atol=near * ranks)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("inner", [dgcopt.ByteGrad(True), dgcopt.TopK(0.1), dgcopt.EFSignSGD(), Chosen()], ids=repr)
    def test_it_is_the_inner_one_on_the_machines_weighed_means(self, node_of, inner, dtype) -> None:
        machines, ranks = sorted(set(node_of)), len(node_of)
        world = World(dgcopt.Hierarchical(copy.deepcopy(inner)), node_of, dtype)
        outer = World(copy.deepcopy(inner), machines, dtype)
        for step in range(3):
            grads = [torch.round(grad * 64).to(dtype) for grad in gradients(ranks, step)]
            means = []
            for machine in machines:
                mine = [grad for grad, node in zip(grads, node_of, strict=True) if node == machine]
                mean = sum(grad.float() for grad in mine) / len(mine)
                means.append(mean.to(dtype) * (len(mine) * len(machines) / ranks))
            assert torch.equal(world.step(grads), outer.step(means).to(dtype))

    def test_only_first_ranks_send_between_machines(self, node_of) -> None:
        world = World(dgcopt.Hierarchical(dgcopt.ByteGrad()), node_of)
        world.step(gradients(len(node_of)))
        dense = world.buckets[0].numel * 4
        for comm, sent in zip(world.comms, world.sent, strict=True):
            inside = [(name, nbytes) for name, group, _, nbytes in sent if group == "node"]
            assert inside == [("AllReduce", dense), ("Broadcast", dense)]
            across = [name for name, group, _, _ in sent if group == "across"]
            assert across == (["AllToAll", "AllGather"] if comm.local_rank == 0 else [])
            assert len(inside) + len(across) == len(sent)

    def test_a_vote_of_machines(self, node_of) -> None:
        result = World(dgcopt.Hierarchical(dgcopt.SignSGD()), node_of).step(gradients(len(node_of)))
        assert set(result.tolist()) <= {-1.0, 0.0, 1.0}

    def test_residuals_on_other_ranks_are_handed_over_once(self, node_of) -> None:
        world = World(dgcopt.Hierarchical(dgcopt.TopK(1.0)), node_of)
        for rank, ctx in enumerate(world.contexts):
            ctx.memory.put("residual", world.flat(torch.full((sum(SIZES),), 2.0**rank)))
        nothing = [torch.zeros(sum(SIZES))] * len(node_of)
        expected = sum(2.0**rank for rank in range(len(node_of)))
        result = world.step(nothing)
        torch.testing.assert_close(result, torch.full_like(result, expected / world.comms[0].nodes))
        assert not world.step(nothing).any()


class Rounds(Compressor):
    """Matrices in three rounds, vectors in one: buckets whose exchanges end at different times."""

    def kind(self, name: str, param: Tensor) -> str:
        return "vector" if param.dim() <= 1 else "matrix"

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        if ctx.kind == "matrix":
            for _ in range(2):
                yield AllGather(torch.zeros(5))
        return (yield AllReduce(grad, op=ctx.op))


def train(comms: list[SimulatedComm], compressor: Compressor, steps: int = 4, momentum: float = 0.0):
    """Parameters and optimizers of every rank after a few steps in several buckets."""
    models = []
    for _ in comms:
        torch.manual_seed(3)
        models.append(
            nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)).double()
        )
    optimizers = [
        dgcopt.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1, momentum=momentum),
            model.named_parameters(),
            copy.deepcopy(compressor),
            comm=comm,
            bucket_mb=0.001,
            first_bucket_mb=0.0005,
        )
        for model, comm in zip(models, comms, strict=True)
    ]
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(6, 9, generator=generator, dtype=torch.float64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    assert all(torch.equal(ours, weights[0]) for ours in weights)
    return weights[0], optimizers


def test_hierarchical_goes_around_no_other_one() -> None:
    """It took the machines for ranks of one more machine, and doubled gradients on machines of two."""
    for inner in (dgcopt.Hierarchical(), dgcopt.FP16(dgcopt.Hierarchical(dgcopt.TopK(0.1)))):
        with pytest.raises(dgcopt.ConfigError, match="Hierarchical cannot contain another Hierarchical"):
            dgcopt.Hierarchical(inner)


@pytest.mark.parametrize("node_of", MACHINES[1:], ids=str)
class TestTraining:
    @pytest.mark.parametrize("inner", [None, Rounds()], ids=repr)
    def test_buckets_of_different_numbers_of_rounds(self, node_of, inner) -> None:
        ours, _ = train(_comms(node_of), dgcopt.Hierarchical(inner), momentum=0.9)
        theirs, _ = train(_comms(node_of), dgcopt.NoCompression(), momentum=0.9)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)

    def test_dgc_at_ratio_1_is_dense_momentum(self, node_of) -> None:
        ours, _ = train(_comms(node_of), dgcopt.Hierarchical(dgcopt.DGC(1.0)), momentum=0.9)
        theirs, _ = train(_comms(node_of), dgcopt.NoCompression(), momentum=0.9)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)

    @pytest.mark.parametrize(
        "inner", [dgcopt.DGC(0.1), dgcopt.ByteGrad(True), dgcopt.FP16(dgcopt.ByteGrad())], ids=lambda c: repr(c)[:30]
    )
    def test_replicas_are_equal_and_residuals_lie_on_first_ranks(self, node_of, inner) -> None:
        comms = _comms(node_of)
        _, optimizers = train(comms, dgcopt.Hierarchical(inner), momentum=0.9)
        for comm, optimizer in zip(comms, optimizers, strict=True):
            keeps = comm.local_rank == 0 and not isinstance(inner, dgcopt.FP16)
            assert (optimizer.residual_norm() > 0) == keeps

    def test_the_ledger_counts_what_each_rank_sends(self, node_of) -> None:
        comms = _comms(node_of)
        _, optimizers = train(comms, dgcopt.Hierarchical(), steps=1)
        _, (plain, *_) = train(_comms(node_of), dgcopt.NoCompression(), steps=1)
        dense = sum(-(-p.numel() // 64) * 64 * 8 for p in plain.param_groups[0]["params"])
        besides = plain.telemetry.payload_bytes - dense
        for comm, optimizer in zip(comms, optimizers, strict=True):
            messages = 3 if comm.local_rank == 0 else 2
            assert optimizer.telemetry.payload_bytes - besides == messages * dense


@pytest.mark.parametrize("kind", [Wrapper, dgcopt.PerParameter])
def test_every_property_of_a_compressor_is_asked_of_those_inside(kind: type[Compressor]) -> None:
    """Also what will be added: an answer of the base class would be nobody's."""
    followed = {"overlap", "whole_model", "in_turn", "overlaps", "first_moment"}  # copied from those inside
    own = {"carrier", "compress", "decompress"}  # of who does not define an exchange
    own |= {"tuner", "sizes"}  # of who chooses compressors, which refuses to be inside another one
    known = {"mixes"}  # of who reads gradients and writes results itself
    known |= {"adds_up"} if kind is Wrapper else set()  # where nothing is done to messages, as only a subclass knows
    asked = {name for name in vars(Compressor) if not name.startswith("_")}
    assert asked - followed - own - known <= vars(kind).keys()
