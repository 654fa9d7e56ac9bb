"""Sharded parameters: FSDP2 within a replica of the model, DistributedOptimizer between replicas.

The ranks are a mesh of 2 x 2; six ranks are 2 x 3 and 3 x 2. Layers have 7, 5 and 1 rows, so shards are uneven, and
some are empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

import dgcopt
from dgcopt import DGC, Comm, ConfigError, NoCompression
from dgcopt.collectives import AllGather, AllReduce, Collective
from dgcopt.comm import Handle
from dgcopt.compressors import Compressor
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.gradients.optimizer import synchronised
from tests.support.library import FIRST_OF_A_KIND

from .collectives import regrouped
from .training import refused

Make = Callable[[Iterable[Tensor]], Optimizer]

TOLERANCE = 1e-6


def mesh_of(comm: Comm, replicas: int) -> DeviceMesh:
    return _meshes(replicas, comm.size // replicas)


@functools.cache
def _meshes(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Uneven layers, one of which has its weight tied to another, one frozen, and one that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(6, 7)
            self.second = nn.Linear(7, 7)
            self.tied = nn.Linear(7, 7, bias=False)
            self.frozen = nn.Linear(7, 5).requires_grad_(False)
            self.extra = nn.Linear(7, 5)
            self.last = nn.Linear(5, 1)
        self.tied.weight = self.second.weight

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.tied(x)
        return self.last(torch.tanh(self.frozen(x) + (self.extra(x) if extra else 0)))


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **settings: Any) -> Any:
    """A model whose layers are groups of FSDP2 of their own, but the tied ones, which are the root's."""
    model = Net() if model is None else model
    for layer in (model.first, model.frozen, model.extra, model.last) if isinstance(model, Net) else model.children():
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def loss_of(model: nn.Module, comm: Comm, step: int, **kwargs: Any) -> Tensor:
    x, y = batch(step, comm.rank)
    return nn.functional.mse_loss(model(x, **kwargs), y)


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    mesh: Mapping[str, DeviceMesh] | DeviceMesh | None,
    compressor: Compressor | None = None,
    **settings: Any,
) -> Any:
    replicate = None if mesh is None else mesh["replicate"]
    settings = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-5, **settings}
    return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compressor, mesh=replicate, **settings)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def local_of(param: Tensor) -> Tensor:
    with torch.no_grad():
        shard: Tensor = param.to_local()
    return shard.detach()


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, what: str) -> None:
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    trained = [param for param in model.parameters() if param.requires_grad]
    # of one row, torch's own step fails on a mesh of two dimensions
    matrices = [param for param in trained if param.dim() == 2 and len(param) > 1]
    others = [param for param in trained if param.dim() < 2 or len(param) == 1]
    return [torch.optim.Muon(matrices, lr=0.005), AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda m: [SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)],
    "SGD, foreach": lambda m: [SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, foreach=True)],
    "AdamW": lambda m: [AdamW(m.parameters(), lr=0.01, eps=1e-4)],
    "AdamW, fused": lambda m: [AdamW(m.parameters(), lr=0.01, eps=1e-4, fused=True)],
    "Muon and AdamW": muon_and_adamw,
}


@mock.patch.object(Tensor, "bfloat16", Tensor.float)  # to which Muon rounds: one bit of a gradient becomes 1% of a step
def equals_native(name: str, replicas: int, comm: Comm) -> None:
    """20 steps at ratio 1, and without compression, are those of FSDP2's own HSDP on the whole mesh."""
    mesh, make = mesh_of(comm, replicas), OPTIMIZERS[name]
    native = sharded(mesh)
    theirs = make(native)
    ways: dict[str, Compressor] = {"NoCompression": NoCompression(), "ratio 1": DGC(1.0, source="gradient")}
    models = {way: sharded(mesh["shard"]) for way in ways}
    ours = {way: [wrap(models[way], one, mesh, c) for one in make(models[way])] for way, c in ways.items()}
    for step in range(20):
        for model, optimizers in [(native, theirs), *((models[way], ours[way]) for way in ways)]:
            for one in optimizers:
                one.zero_grad()
            loss_of(model, comm, step, extra=step % 3 > 0).backward()
            for one in optimizers:
                one.step()
    before = dict(Net().named_parameters())
    moved = {name for name, tensor in whole(native).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, param in before.items() if param.requires_grad}
    for way, model in models.items():
        assert_close(whole(model), whole(native), TOLERANCE, f"{name}, {way}")


class Recorder:
    """The gradients that backward passes make of this rank's shards, in the order of their becoming ready.

    It must come before the wrapper, which exchanges them in the same hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.start = {name: local_of(param).clone() for name, param in self.named.items()}
        self.steps: list[dict[str, Tensor]] = []
        for name, param in self.named.items():
            param.register_post_accumulate_grad_hook(functools.partial(self._record, name))

    def _record(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self.steps[-1][name] = local_of(param.grad).clone()


class Wide(nn.Sequential):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            super().__init__(nn.Linear(6, 41), nn.Tanh(), nn.Linear(41, 30), nn.Tanh(), nn.Linear(30, 1))


def recorded(
    comm: Comm, replicas: int, compressor: Compressor, make: Callable[..., Optimizer], steps: int, **settings: Any
) -> tuple[Recorder, Any]:
    """Train a sharded model, and write down what comes in."""
    mesh = mesh_of(comm, replicas)
    model = sharded(mesh["shard"], Wide())
    recorder = Recorder(model)
    optimizer = wrap(model, make(model.parameters()), mesh, compressor, **settings)
    for step in range(steps):
        recorder.steps.append({})
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()
    return recorder, optimizer


def simulated(
    start: dict[str, Tensor],
    steps: Sequence[dict[str, Sequence[Tensor]]],
    compressor: Compressor,
    make: Callable[..., Any],
) -> dict[str, Tensor]:
    """The weights after the same steps of plain parameters, given each replica's gradients of every step."""
    comms = dgcopt.simulated_world(len(next(iter(steps[0].values()))))
    params = [{name: nn.Parameter(tensor.clone()) for name, tensor in start.items()} for _ in comms]
    optimizers: list[Any] = [
        dgcopt.DistributedOptimizer(
            make(p.values()), p.items(), compressor, comm=c, bucket_mb=1e-4, first_bucket_mb=1e-5
        )
        for p, c in zip(params, comms, strict=True)
    ]
    for of_step in steps:
        for replica, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            for name, grads in of_step.items():
                param = params[replica][name]
                param.grad = grads[replica].clone()
                synchronised(optimizer).gradient_arrived(param)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach() for name, param in params[0].items()}


def as_plain_tensors(place: int, replicas: int, comm: Comm) -> None:
    """Each shard becomes what the same rule makes of a plain tensor that holds it, on simulated ranks."""
    compressor, given = FIRST_OF_A_KIND[place]
    momentum = 0.0 if isinstance(compressor, dgcopt.DeMo | dgcopt.Signum) else 0.9  # which have one of their own
    make = given.get("optimizer", functools.partial(SGD, lr=0.05, momentum=momentum))
    recorder, _ = recorded(comm, replicas, compressor, make, 4)
    shards = comm.size // replicas
    group = range(comm.rank % shards, comm.size, shards)
    steps = [{n: gathered(comm, of_step[n], group) for n in of_step} for of_step in recorder.steps]
    mine = {name: start for name, start in recorder.start.items() if start.numel()}
    theirs = simulated(mine, [{n: g for n, g in s.items() if n in mine} for s in steps], compressor, make)
    ours = {name: local_of(recorder.named[name]) for name in mine}
    moved = torch.tensor([any(not torch.equal(ours[name], mine[name]) for name in mine)])
    assert comm.run(AllGather(moved, label="moved")).any(), "nothing was trained"  # below a threshold on some ranks
    assert_close(ours, theirs, TOLERANCE, f"{compressor!r}")


ELEMENTWISE: dict[str, Compressor] = {
    "NoCompression": NoCompression(),
    "FP16": dgcopt.FP16(),
    "BF16": dgcopt.BF16(),
    "SignSGD": dgcopt.SignSGD(),
    "Signum": dgcopt.Signum(),
    "Threshold": dgcopt.Threshold(0.02, 1.0),
    "DGC at ratio 1": DGC(1.0),
    "DGC at ratio 1, clipped": DGC(1.0, clip=dgcopt.LocalClip(0.05)),
    "PerParameter with one rule, clipped": dgcopt.PerParameter({"*": DGC(1.0, clip=dgcopt.LocalClip(0.05))}),
}
"""Rules that take no other element of a parameter into account, apart from the norm of all gradients."""


def as_whole_parameters(replicas: int, comm: Comm) -> None:
    """Elementwise rules make of shards what they make of whole parameters, to float tolerance."""
    make = functools.partial(SGD, lr=0.05, momentum=0.9)
    shards = comm.size // replicas
    for name, compressor in ELEMENTWISE.items():
        of = functools.partial(SGD, lr=0.05) if name == "Signum" else make
        recorder, _ = recorded(comm, replicas, compressor, of, 5)

        def joined(n: str, tensor: Tensor) -> list[Tensor]:
            parts = [gathered(comm, tensor, [rank], flat=True)[0] for rank in range(comm.size)]
            shape = recorder.named[n].shape  # noqa: B023
            return [torch.cat(parts[r : r + shards]).view(shape) for r in range(0, comm.size, shards)]

        steps = [{n: joined(n, g) for n, g in of_step.items()} for of_step in recorder.steps]
        start = {n: joined(n, tensor)[0] for n, tensor in recorder.start.items()}
        ours = {n: param.detach().full_tensor() for n, param in recorder.named.items()}  # type: ignore[attr-defined]
        theirs = simulated(start, steps, compressor, of)
        half = {"FP16": torch.float16, "BF16": torch.bfloat16}.get(name)
        for n in ours:
            allowed = torch.full_like(ours[n], TOLERANCE)
            if half is not None and replicas > 2:  # the order of such a sum is that of its place in the bucket
                allowed += between_orders([torch.stack(of_step[n]) for of_step in steps], half, lr=0.05, momentum=0.9)
            apart = (ours[n] - theirs[n]).abs()
            assert (apart <= allowed).all(), f"{name} {n}: {apart.max()} apart, {allowed.max()} allowed"


def between_orders(steps: Sequence[Tensor], dtype: torch.dtype, lr: float, momentum: float) -> Tensor:
    """How far two orders of summation can set SGD's weights apart; `steps` hold the gradients of each replica as rows.

    Each of n - 1 additions rounds by at most half an eps of the sum of magnitudes, in either order.
    """
    apart = torch.zeros_like(steps[0][0])
    for step, grads in enumerate(steps):
        counted = sum(momentum**later for later in range(len(steps) - step))
        apart += lr * counted * (len(grads) - 1) * torch.finfo(dtype).eps * grads.abs().mean(0)
    return apart


def gathered(comm: Comm, tensor: Tensor, ranks: Iterable[int], flat: bool = False) -> list[Tensor]:
    """The tensors of some ranks, of this one's shape unless `flat`; every rank must call it equally often."""
    lengths = comm.run(AllGather(torch.tensor([tensor.numel()]), label="lengths")).flatten().tolist()
    padded = torch.zeros(max(lengths))
    padded[: tensor.numel()] = tensor.flatten()
    rows = comm.run(AllGather(padded, label="gradients"))
    parts = [rows[rank][: lengths[rank]] for rank in ranks]
    return parts if flat else [part.view(tensor.shape) for part in parts]


@contextmanager
def started_by(optimizer: Any) -> Iterator[list[str]]:
    """The collectives of gradients that an optimizer starts within it."""
    part = synchronised(optimizer)
    assert part is not None
    comm, started = part.comm, list[str]()
    start = comm.start

    def spy(collective: Collective) -> Handle:
        if collective.group == "world":
            started.append(collective.describe())
        return start(collective)

    comm.start = spy  # type: ignore[method-assign]
    try:
        yield started
    finally:
        del comm.start  # type: ignore[method-assign]


def leaves_during_backward(comm: Comm) -> None:
    """From the second step on all buckets are on their way when backward returns, the last layer's first."""
    mesh = mesh_of(comm, 2)
    for compressor in (NoCompression(), DGC(0.1, overlap=True)):
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, compressor)
        for step in range(3):
            before_last = list[int]()
            with started_by(optimizer) as started:
                handle = model[0].weight.register_post_accumulate_grad_hook(
                    lambda _, seen=before_last, told=started: seen.append(len(told))
                )
                loss_of(model, comm, step).backward()
                during = list(started)
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
            if step:
                assert during == started, f"{set(started) - set(during)} waited for the end of backward"
                assert before_last[0] > 0, "nothing left before the first layer's gradient was there"
                assert "(4." in during[0] or "(2." in during[0], f"the last layer should go first: {during}"


def skipped_everywhere(comm: Comm) -> None:
    """NaN in one rank's shard: no rank steps, no memory changes, and the next step is taken."""
    mesh = mesh_of(comm, 2)
    for compressor, make in (
        (DGC(0.3), functools.partial(SGD, lr=0.01, momentum=0.9)),
        (DGC(0.3, overlap=True), functools.partial(SGD, lr=0.01, momentum=0.9)),
        (dgcopt.TopK(0.3), functools.partial(AdamW, lr=0.01)),
    ):
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, make(model.parameters()), mesh, compressor)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            if step == 2 and comm.rank == comm.size - 1:
                local_of(model[2].weight.grad)[0] = torch.nan
            before = whole(model), memory_of(optimizer)
            optimizer.step()
            after = whole(model), memory_of(optimizer)
            same = [torch.equal(before[0][name], tensor) for name, tensor in after[0].items()]
            assert all(same) if step == 2 else not any(same), f"rank {comm.rank}, step {step}: {same}"
            assert same_memory(before[1], after[1]) == (step == 2), f"rank {comm.rank}, step {step}"
        assert optimizer.telemetry.skipped == 1


def errors_name_global_ranks(comm: Comm) -> None:
    """By their number among all ranks, and the replica: where replicas differ, and where shards of one do."""
    mesh = mesh_of(comm, 2)

    def step(changes: bool, **settings: Any) -> None:
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, DGC(0.3), **settings)
        optimizer.param_groups[0]["lr"] *= 1 + changes
        for at in range(3):  # shards compare 8 bits in each
            optimizer.zero_grad()
            loss_of(model, comm, at).backward()
            optimizer.step()

    mine, pair = f"rank {comm.rank} (replica {comm.rank // 2})", f"rank {comm.rank % 2 + 2} (replica 1)"
    with refused(comm, dgcopt.MismatchError, f"seen on {mine}", f"{pair} has [bucket_mb: 0.001]"):
        step(False, **({"bucket_mb": 0.001} if comm.rank > 1 else {}))
    with refused(comm, dgcopt.MismatchError, mine, "hold shards of one replica", "such as the learning rate"):
        step(comm.rank % 2 == 1)


def wrapped_before_it_is_sharded(comm: Comm) -> None:
    """An optimizer of the parameters that fully_shard has replaced since refuses to step, on all ranks."""
    model = Wide()
    optimizer = dgcopt.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm)
    fully_shard(model, mesh=mesh_of(comm, 2)["shard"])
    loss_of(model, comm, 0).backward()
    with refused(comm, ConfigError, "after the optimizer was wrapped", "Call fully_shard first"):
        optimizer.step()


def void_when_it_arrives(comm: Comm) -> None:
    """Momentum that overflows in one shard is found where it has arrived: other shards abort the step too."""
    mesh = mesh_of(comm, 2)
    model = sharded(mesh["shard"], Wide())
    is_large = False

    def enlarge(param: Tensor) -> None:  # before the gradient leaves, so that it leaves once
        if is_large:
            local_of(param.grad).fill_(3e38)  # twice as large a momentum in the next step is infinite

    model[2].weight.register_post_accumulate_grad_hook(enlarge)
    optimizer = wrap(model, SGD(model.parameters(), lr=0.0, momentum=0.9), mesh, DGC(0.3, overlap=True))
    for step in range(4):
        optimizer.zero_grad()
        is_large = step > 1 and comm.rank % 2 == 1
        loss_of(model, comm, step).backward()
        before = memory_of(optimizer)
        optimizer.step()
        assert same_memory(before, memory_of(optimizer)) == (step == 3), f"rank {comm.rank}, step {step}"
    assert optimizer.telemetry.skipped == 1


def same_memory(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    pairs = [(kept, other.get(kind, {}).get(name)) for kind, by in one.items() for name, kept in by.items()]
    return bool(pairs) and all(new is not None and torch.equal(old, new) for old, new in pairs)


def memory_of(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    memory: dict[str, dict[str, Tensor]] = optimizer.state_dict()[STATE_KEY]["memory"]
    return memory


def large() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 256), nn.Linear(256, 1))


def memory_and_bytes_are_of_shards(comm: Comm) -> None:
    """What a rank keeps, and what it sends, is that of the whole parameters divided by the size of the shard group."""
    mesh = mesh_of(comm, 2)
    for compressor in (NoCompression(), DGC(0.01), dgcopt.TopK(0.01, "int8", "rice"), dgcopt.EFSignSGD()):
        model = sharded(mesh["shard"], large())
        numel = sum(param.numel() for param in model.parameters())
        mine = sum(local_of(param).numel() for param in model.parameters())
        assert abs(2 * mine / numel - 1) < 0.01
        make = functools.partial(SGD, lr=0.01, momentum=0.9)
        optimizer = dgcopt.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), compressor, mesh=mesh["replicate"]
        )
        simulated_models = [large(), large()]
        whole_ones: list[Any] = [
            dgcopt.DistributedOptimizer(make(m.parameters()), m.named_parameters(), compressor, comm=c)
            for m, c in zip(simulated_models, dgcopt.simulated_world(2), strict=True)
        ]
        counted = []
        for step in range(4):
            for one, m in ((optimizer, model), *zip(whole_ones, simulated_models, strict=True)):
                one.zero_grad()
                loss_of(m, comm, step).backward()
            for one in (optimizer, *whole_ones):
                one.step()
            counted.append((optimizer.telemetry.sent_bytes, whole_ones[0].telemetry.sent_bytes))
        ours, theirs = (last - first for first, last in zip(counted[0], counted[-1], strict=True))
        assert abs(2 * ours / theirs - 1) < 0.03, (
            f"{compressor!r}: {ours} bytes of shards, {theirs} of whole parameters"
        )
        for kind, by_name in memory_of(optimizer).items():
            of_kind = memory_of(whole_ones[0])[kind]
            kept = sum(tensor.numel() for tensor in by_name.values())
            assert abs(2 * kept / sum(tensor.numel() for tensor in of_kind.values()) - 1) < 0.01, kind
        assert not isinstance(compressor, DGC) or {*memory_of(optimizer)} == {"residual", "momentum"}


def as_fsdp_accumulates(comm: Comm) -> None:
    """Passes that FSDP2 does not reduce, passes that it does, and dgcopt's own no_sync: one sum, as native HSDP's."""
    mesh = mesh_of(comm, 2)
    for how in ("reduced at the end", "reduced each time", "no_sync"):
        native, model = sharded(mesh), sharded(mesh["shard"])
        theirs, ours = SGD(native.parameters(), lr=0.05), wrap(model, SGD(model.parameters(), lr=0.05), mesh, DGC(1.0))
        for step in range(4):
            for one, m in ((theirs, native), (ours, model)):
                one.zero_grad(set_to_none=step % 2 == 0)
                for micro in range(3):
                    if how == "reduced at the end":
                        m.set_requires_gradient_sync(micro == 2)
                    outside = how != "no_sync" or micro == 2 or one is theirs
                    with nullcontext() if outside else one.no_sync():
                        loss_of(m, comm, 3 * step + micro).backward()
                one.step()
        assert_close(whole(model), whole(native), TOLERANCE, how)


def in_mixed_precision(comm: Comm) -> None:
    """Weights in bfloat16 for forward, sums in float32, gradients clipped over shards and replicas: as native HSDP."""
    mesh = mesh_of(comm, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    native, model = sharded(mesh, mp_policy=policy), sharded(mesh["shard"], mp_policy=policy)
    theirs = AdamW(native.parameters(), lr=0.01, eps=1e-3)
    ours = wrap(model, AdamW(model.parameters(), lr=0.01, eps=1e-3), mesh)
    for step in range(10):
        x, y = batch(step, comm.rank)
        norms = []
        for one, m in ((theirs, native), (ours, model)):
            one.zero_grad()
            nn.functional.mse_loss(m(x.bfloat16()).float(), y).backward()
            if one is ours:
                norms.append(one.clip_grad_norm_(0.1))
            else:
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1).full_tensor())  # type: ignore[attr-defined]
            one.step()
        assert norms[0] > 0.1 and abs(norms[0] / norms[1] - 1) < 1e-4, f"step {step}: {norms}"
    assert_close(whole(model), whole(native), 1e-4, "in bfloat16")


def unused_in_one_replica(comm: Comm) -> None:
    """A layer that one replica leaves out counts as zero there; its gradient is that of the other, halved."""
    mesh = mesh_of(comm, 2)
    model = sharded(mesh["shard"])
    optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, DGC(1.0))
    for step in range(3):
        optimizer.zero_grad()
        before = whole(model)
        uses = step == 1 and comm.rank < comm.size // 2
        loss_of(model, comm, step, extra=uses).backward()
        mine = model.extra.weight.grad
        assert (mine is not None) == uses
        wanted = None if mine is None else mine.full_tensor().clone()
        optimizer.step()
        moved = before["extra.weight"] - whole(model)["extra.weight"]
        assert bool(moved.any()) == (step == 1)
        if wanted is not None:
            torch.testing.assert_close(moved, 0.1 * wanted / 2)


def the_replicate_group_is_found(comm: Comm) -> None:
    """From the shards' own mesh, by `process_set="across"`, or as it was given: the same ranks."""
    for replicas in (2, comm.size):
        mesh = mesh_of(comm, replicas)
        shards = comm.size // replicas
        model = sharded(mesh["shard"])
        machines = regrouped(comm, [rank // shards for rank in range(comm.size)])
        ways: list[dict[str, Any]] = [{}, {"mesh": mesh["replicate"]}, {"process_set": "across", "comm": machines}]
        for settings in ways:
            optimizer = dgcopt.DistributedOptimizer(
                SGD(model.parameters(), lr=0.1), model.named_parameters(), **{"comm": comm, **settings}
            )
            made = synchronised(optimizer).comm  # type: ignore[union-attr]
            assert (made.rank, made.size) == (comm.rank // shards, replicas), f"{settings}: {made}"
            row = comm.rank // shards * shards
            assert made.ranks("replica") == tuple(range(row, row + shards))


def wrong_meshes(comm: Comm) -> None:
    """Each is refused on all ranks in a sentence, before anything is exchanged; the wire goes on."""
    mesh = mesh_of(comm, 2)
    half = mesh["shard"]

    def refuse(model: nn.Module, *words: str, named: Any = None, optimizer: Any = None, **settings: Any) -> None:
        optimizer = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        with refused(comm, ConfigError, *words):
            dgcopt.DistributedOptimizer(optimizer, named or model.named_parameters(), **{"comm": comm, **settings})

    model = sharded(half)
    refuse(model, "mesh has 2 dimensions ('replicate', 'shard')", "mesh['replicate']", mesh=mesh)
    refuse(model, "mesh must be a torch DeviceMesh", mesh="replicate")
    refuse(model, "are in both", "fully_shard(module, mesh=mesh['shard'])", mesh=half)
    refuse(model, "give mesh=mesh['replicate'] in place of process_set", process_set=[0, 1])
    refuse(model, "give mesh=mesh['replicate'] in place of", process_set="across", mesh=mesh["replicate"])
    refuse(model, "over the wire simulated", "torchrun", comm=dgcopt.simulated_world(2)[0])
    halves = regrouped(comm, [rank // 2 for rank in range(comm.size)])
    refuse(model, "over some of the ranks only", comm=halves.among("node"))
    crossed = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("all",))
    refuse(model, "are in both", mesh=crossed)
    refuse(
        sharded(mesh), "sharded over all 4 ranks, a replicate group of one", "fully_shard(module, mesh=mesh['shard'])"
    )
    refuse(sharded(mesh), "are in both", mesh=mesh["replicate"])
    alone = _meshes(1, comm.size)
    refuse(sharded(alone["shard"]), "a replicate group of one", mesh=alone["replicate"])
    refuse(sharded(alone["shard"]), "a replicate group of one", "step the bare optimizer")

    partly = Net()
    fully_shard(partly.first, mesh=half)
    refuse(partly, "parameter 'second.weight' is outside the mesh", "fully_shard on the whole model")
    several = Wide()
    fully_shard(several[0], mesh=half)
    fully_shard(several, mesh=mesh["replicate"])
    refuse(several, "over several meshes ('0.", "the replicate group is ambiguous")
    refuse(several, "sharded over ranks [0, 1, 2]", "are in both", mesh=mesh["replicate"])
    refuse(Net(), "mesh is for sharded parameters", "before the optimizer is made", mesh=mesh["replicate"])

    late = Wide()
    early = SGD(late.parameters(), lr=0.1)
    fully_shard(late, mesh=half)
    refuse(late, "make the optimizer after fully_shard", optimizer=early, mesh=mesh["replicate"])

    grown = wrap(model, SGD(model.parameters(), lr=0.1), mesh)
    with refused(comm, ConfigError, "is outside the mesh"):
        grown.add_param_group({"params": list(Wide().parameters())})
    with refused(comm, ConfigError, "cannot rejoin"):
        grown.rejoin()
    some = dgcopt.PerParameter({"first": DGC(0.1, clip=dgcopt.LocalClip(1.0)), "*": NoCompression()})
    refuse(model, "clips the norm of some parameters", "clip per='tensor'", compression=some)


def a_rank_without_elements(comm: Comm) -> None:
    """The only row is on the first rank of each replica: the others take part in votes and norms, and do not hang."""
    mesh = mesh_of(comm, 2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = sharded(mesh["shard"], nn.Sequential(nn.Linear(6, 1, bias=False)))
    max_norm, lr = 0.01, 0.1
    clip = dgcopt.LocalClip(max_norm)
    optimizer = wrap(model, SGD(model.parameters(), lr=lr), mesh, DGC(1.0, source="gradient", clip=clip))
    for step in range(3):
        before = whole(model)["0.weight"]
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        own = model[0].weight.grad.full_tensor()
        clipped = own * min(1.0, clip.local_threshold(2, "average") / float(own.norm()))
        mean = comm.run(AllReduce(clipped.clone(), label="of all ranks"))
        optimizer.step()
        torch.testing.assert_close(whole(model)["0.weight"], before - lr * mean)


def reduces_in_a_code(comm: Comm) -> None:
    """Shards of gradients are the mean over a replica within the code's rounding; NaN stays; DGC goes on from it."""
    mesh = mesh_of(comm, 2)
    for code, of_largest in (("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 127), ("bytegrad", 1 / 255)):
        exact, coded = (sharded(mesh["shard"], Wide()) for _ in range(2))
        dgcopt.sharded.compress_reduce_scatter(coded, code)
        for model in (exact, coded):
            loss_of(model, comm, 0).backward()
        wanted = [local_of(param.grad) for param in exact.parameters()]
        largest = max(float(grad.abs().max()) for grad in wanted if grad.numel())
        largest = float(comm.run(AllReduce(torch.tensor([largest]), op="max", label="largest")))
        apart = [
            float((local_of(param.grad) - grad).abs().max())
            for param, grad in zip(coded.parameters(), wanted, strict=True)
            if grad.numel()
        ]
        assert max(apart) <= 4 * of_largest * largest, f"{code}: {max(apart)} apart, of {largest}"
        assert max(apart) > 0, f"{code} has rounded nothing"
        coded.zero_grad()
        x, y = batch(0, comm.rank)
        nn.functional.mse_loss(coded(x.fill_(torch.nan) if comm.rank == 0 else x), y).backward()
        spoiled = torch.tensor([any(bool(local_of(p.grad).isnan().any()) for p in coded.parameters())])
        assert comm.run(AllGather(spoiled, label="spoiled")).flatten().tolist() == [True, True, False, False], code
        coded.zero_grad()
        optimizer = wrap(coded, SGD(coded.parameters(), lr=0.05, momentum=0.9), mesh, DGC(0.3))
        start = comm.run(AllReduce(loss_of(coded, comm, 0).detach(), label="loss"))
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(coded, comm, 0).backward()
            optimizer.step()
        assert comm.run(AllReduce(loss_of(coded, comm, 0).detach(), label="loss")) < start, code
        assert optimizer.telemetry.skipped == 0
    sizes: list[int] = []
    whole_to_all = torch.distributed.all_to_all_single

    def counted(output: Tensor, given: Tensor, **settings: Any) -> Any:
        sizes.append(given.numel() * given.element_size())
        return whole_to_all(output, given, **settings)

    with mock.patch.object(torch.distributed, "all_to_all_single", counted):
        model = sharded(mesh["shard"], large())
        dgcopt.sharded.compress_reduce_scatter(model, "int8")
        loss_of(model, comm, 0).backward()
    numel = sum(param.numel() for param in model.parameters())
    assert numel <= sum(sizes) < 1.03 * numel, (sizes, numel)
    with refused(comm, ConfigError, "code must be one of fp16, bf16, int8, bytegrad, not 'int4'"):
        dgcopt.sharded.compress_reduce_scatter(model, "int4")
    with refused(comm, ConfigError, "call fully_shard first"):
        dgcopt.sharded.compress_reduce_scatter(Wide())
    with refused(comm, ConfigError, "adds up or averages"):
        scatter = dgcopt.sharded.CompressedReduceScatter("bf16")
        scatter(torch.zeros(1), torch.zeros(2), mesh["shard"].get_group(), torch.distributed.ReduceOp.MAX)


def nan_in_one_shard(comm: Comm, optimizer: Any, model: Any, given: tuple[Tensor, Tensor]) -> None:
    """The last rank's NaN in the first layer skips the step on all ranks."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(given[0]), given[1]).backward()
    before, skipped = {n: local_of(p).clone() for n, p in model.named_parameters()}, optimizer.telemetry.skipped
    if comm.rank == comm.size - 1:
        local_of(model[0].weight.grad).fill_(torch.nan)
    optimizer.step()
    assert optimizer.telemetry.skipped == skipped + 1
    assert all(torch.equal(local_of(p), before[n]) for n, p in model.named_parameters())


def in_tensor_parallel(shards: int, comm: Comm) -> None:
    """On a mesh (replicate, shard, tensor), layers that are split, and one that is not: as FSDP2 on all of it."""
    tensors = 2
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (comm.size // shards // tensors, shards, tensors), mesh_dim_names=names)
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parallel(over: DeviceMesh) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            layers = (nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
        return sharded(over, parallelize_module(nn.Sequential(*layers), mesh["tensor"], plan))

    replica = comm.rank // tensors  # ranks of one tensor group have the same batch
    for make in (functools.partial(SGD, lr=0.05, momentum=0.9), functools.partial(AdamW, lr=0.01, eps=1e-4)):
        native, model, sparse = parallel(mesh["replicate", "shard"]), *(parallel(mesh["shard"]) for _ in range(2))
        theirs = make(native.parameters())
        ours = wrap(model, make(model.parameters()), mesh, DGC(1.0, source="gradient"))
        selecting = wrap(sparse, make(sparse.parameters()), mesh, DGC(0.2))
        for step in range(10):
            x, y = batch(step, replica)
            for one, m in ((theirs, native), (ours, model), (selecting, sparse)):
                one.zero_grad()
                nn.functional.mse_loss(m(x), y).backward()
                one.step()
        assert_close(whole(model), whole(native), TOLERANCE, "tensor parallel")
        assert selecting.residual_norm() > 0
        place = selecting.state_dict()[STATE_KEY]["shard"]["place"]
        assert place["4.weight"]["size"][1] == 30 and place["2.weight"]["size"][1] == 10, place
        steps = synchronised(selecting)
        assert steps is not None
        assert steps.comm.size_of("replica") == shards * tensors
        dgcopt.check_replicas({n: local_of(p) for n, p in sparse.named_parameters()}, comm=steps.comm)
        weights = {n: local_of(p) for n, p in sparse.named_parameters() if n.startswith("4.")}  # in no tensor group
        for weight in weights.values() if shards == 1 else ():
            rows = comm.run(AllGather(weight.clone(), label="whole layer"))
            assert bool((rows == rows[:1]).all()), "ranks of one tensor group hold other bits of a layer that both have"
        nan_in_one_shard(comm, selecting, sparse, batch(11, replica))
    with refused(comm, ConfigError, "several meshes", "DistributedOptimizer(..., mesh=mesh['replicate'])"):
        dgcopt.DistributedOptimizer(SGD(sparse.parameters(), lr=0.1), sparse.named_parameters(), comm=comm)


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    **{f"sharded: native, {name}": functools.partial(equals_native, name, 2) for name in OPTIMIZERS},
    **{
        f"sharded: plain tensors, {type(compressor).__name__}": functools.partial(as_plain_tensors, place, 2)
        for place, (compressor, _) in enumerate(FIRST_OF_A_KIND)
    },
    "sharded: whole parameters": functools.partial(as_whole_parameters, 2),
    "sharded: tensor parallel, 2 x 1 x 2": functools.partial(in_tensor_parallel, 1),
    **{
        f"sharded: {function.__name__}": function
        for function in (
            leaves_during_backward,
            skipped_everywhere,
            void_when_it_arrives,
            memory_and_bytes_are_of_shards,
            a_rank_without_elements,
            as_fsdp_accumulates,
            in_mixed_precision,
            unused_in_one_replica,
            reduces_in_a_code,
            the_replicate_group_is_found,
            wrong_meshes,
            wrapped_before_it_is_sharded,
            errors_name_global_ranks,
        )
    },
}
"""Among four ranks."""

OF_SIX: dict[str, Callable[[Comm], Any]] = {
    f"sharded {replicas} x {6 // replicas}: {what}": functools.partial(scenario, replicas)
    for replicas in (2, 3)
    for what, scenario in {
        **{f"native, {name}": functools.partial(equals_native, name) for name in ("SGD", "AdamW", "Muon and AdamW")},
        **{
            f"plain tensors, {type(compressor).__name__}": functools.partial(as_plain_tensors, place)
            for place, (compressor, _) in enumerate(FIRST_OF_A_KIND)
            if isinstance(compressor, DGC | dgcopt.EFSignSGD | dgcopt.PowerSGD)
        },
        "whole parameters": as_whole_parameters,
    }.items()
}
"""Among six ranks."""
