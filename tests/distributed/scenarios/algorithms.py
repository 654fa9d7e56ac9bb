"""Promises 1, 2 and 3: nothing is lost, replicas stay bit-identical, and simulated ranks equal real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import BF16, DGC, FP16, Comm, LocalClip, NoCompression, Warmup
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.compressors import Compressor
from tests.support.wires import only

from .optimizers import one_cycle
from .training import (
    TINY,
    Recipe,
    Replica,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    fingerprint,
    gather_text,
    make_model,
    memory_of,
    tensors_in,
    train,
)

WARMUP = Warmup(ratios=(0.5, 0.1), steps=2)
DENSE = {"NoCompression": NoCompression(), "FP16": FP16(), "BF16": BF16()}
SPARSE = {
    "DGC": DGC(0.01),
    "DGC, warm-up": DGC(0.02, warmup=WARMUP, overlap=True),
    "DGC, fp16": DGC(0.1, values="fp16", momentum_masking=False),
    "DGC, bf16": DGC(0.1, values="bf16"),
    "DGC, int8": DGC(0.05, values="int8", indices="rice", vectors="int8"),
    "DGC, int2": DGC(0.05, values="int2", indices="rice", vectors="int4", overlap=True),
    "DGC, owner": DGC(0.05, values="int2", indices="rice", vectors="int8", reduce="owner"),
    "DGC, clipped per model": DGC(0.1, clip=LocalClip(0.05)),
    "DGC, clipped per tensor": DGC(0.1, clip=LocalClip(0.05, per="tensor")),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
}
PLAIN: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.SGD, lr=0.1)
LIBRARY: dict[str, tuple[Compressor, Callable[..., torch.optim.Optimizer]]] = {
    "TopK": (dgcopt.TopK(0.1), PLAIN),
    "TopK of updates": (dgcopt.TopK(0.1, "int2", "rice"), OPTIMIZERS["Adam"]),
    "TopK, owner": (dgcopt.TopK(0.1, reduce="owner"), PLAIN),
    "TopK, partition": (dgcopt.TopK(0.1, reduce="partition"), PLAIN),
    "RandomK": (dgcopt.RandomK(0.1), PLAIN),
    "Threshold": (dgcopt.Threshold(0.05), PLAIN),
    "ChunkedTopK": (dgcopt.ChunkedTopK(0.1, 64), PLAIN),
    "CLTK": (dgcopt.CLTK(0.1), PLAIN),
    "CSC": (dgcopt.CSC(0.3, 64), OPTIMIZERS["Nesterov"]),
    "DeMo": (dgcopt.DeMo(), PLAIN),
    "PowerSGD": (dgcopt.PowerSGD(2, start_step=1, min_compression_rate=0.5), OPTIMIZERS["Nesterov"]),
    "BF16, PowerSGD": (BF16(dgcopt.PowerSGD(start_step=1, granularity="bucket")), PLAIN),
    "ByteGrad": (dgcopt.ByteGrad(), PLAIN),
    "ByteGrad, hierarchical": (dgcopt.Hierarchical(dgcopt.ByteGrad()), PLAIN),
    "DGC, hierarchical": (dgcopt.Hierarchical(DGC(0.1)), OPTIMIZERS["Nesterov"]),
    "PerParameter": (dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": DGC(0.1)}), OPTIMIZERS["Nesterov"]),
    "PerParameter, gradients and updates": (
        dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.TopK(0.1)}),
        OPTIMIZERS["Adam"],
    ),
    "SignSGD": (dgcopt.SignSGD(), PLAIN),
    "Signum": (dgcopt.Signum(), PLAIN),
    "EFSignSGD": (dgcopt.EFSignSGD(), PLAIN),
    "OneBitReduce": (dgcopt.OneBitReduce(), PLAIN),
    "OneBit": (dgcopt.OneBit(), OPTIMIZERS["Nesterov"]),
    "TernGrad": (dgcopt.TernGrad(), PLAIN),
    "QSGD": (dgcopt.QSGD(), PLAIN),
    "Natural": (dgcopt.Natural(), OPTIMIZERS["Nesterov"]),
    "QAdam": (dgcopt.QAdam(warmup_steps=2), OPTIMIZERS["Adam"]),
    "OneBitAdam": (dgcopt.OneBitAdam(warmup_steps=2), OPTIMIZERS["Adam"]),
}
"""Every other compressor, and an optimizer that it goes with."""


def mixed_model() -> nn.Module:
    """Layers of three dtypes."""
    model = make_model(torch.float32)
    model[2].to(torch.float64)
    model[4].to(torch.bfloat16)
    return model


class Mixed(Replica):
    def loss(self, step: int, micro: int) -> Tensor:
        x, y = batch(step, micro, self.comm, torch.float32)
        for layer in self.model:
            x = layer(x.to(layer.weight.dtype)) if isinstance(layer, nn.Linear) else layer(x)
        return nn.functional.mse_loss(x.float(), y)


def replicas_stay_identical(compression: Any, comm: Comm) -> None:
    """Promise 2, of parameters and of optimizer state, after every step, from ranks that start apart."""
    for name, optimizer in OPTIMIZERS.items():
        recipe = Recipe(
            lambda named, make=optimizer: make([param for _, param in named]),
            model=mixed_model,
            compression=compression,
            schedule=one_cycle,
            buckets=(*TINY.items(),),
        )
        mine = Mixed(recipe, comm)
        with torch.no_grad():
            for param in mine.parameters:
                param.add_(comm.rank)
        dgcopt.broadcast_parameters(mine.model.state_dict(), comm=comm)
        for step in range(6):
            train([mine], [step])
            shared = mine.optimizer.compressor.sends == "gradient"  # what is made of local gradients is local
            state = tensors_in(mine.optimizer.state_dict()["state"]) if shared else []
            assert_same_on_all_ranks(comm, [*mine.parameters, *state], f"{name} after step {step}")


def simulated_recipe(optimizer: str, compression: Any, accumulate: int = 1) -> Recipe:
    return Recipe(
        lambda named: OPTIMIZERS[optimizer]([param for _, param in named]),
        model=functools.partial(make_model, torch.float32),
        compression=compression,
        schedule=one_cycle,
        accumulate=accumulate,
        buckets=(*TINY.items(),),
    )


def bits_of_simulated_ranks(compression: Any, optimizer: str, size: int) -> tuple[list[str], list[str]]:
    """Hashes of the parameters, which are all ranks', after every step; and of every rank's memory at the end."""
    recipe = simulated_recipe(optimizer, replace(compression, vectors="sparse"), accumulate=2)
    ranks, hashes = [Replica(recipe, comm) for comm in dgcopt.simulated_world(size)], []
    for step in range(6):
        train(ranks, [step])
        (only,) = {fingerprint(rank.parameters) for rank in ranks}
        hashes.append(only)
    return hashes, [fingerprint(tensors_in(memory_of(rank.optimizer))) for rank in ranks]


def simulated_ranks_equal_real_ones(compression: Any, comm: Comm) -> dict[str, Any]:
    """Promise 3 where dgcopt does the sum: parameters after every step, and every rank's memory, bit for bit."""
    found = {}
    for optimizer in OPTIMIZERS:
        recipe = simulated_recipe(optimizer, replace(compression, vectors="sparse"), accumulate=2)
        mine, hashes = Replica(recipe, comm), []
        for step in range(6):
            train([mine], [step])
            hashes.append(assert_same_on_all_ranks(comm, mine.parameters, f"{optimizer}, step {step}"))
        found[optimizer] = [hashes, gather_text(comm, fingerprint(tensors_in(memory_of(mine.optimizer))))]
    return found


def simulated_ranks_are_close_to_real_ones(comm: Comm) -> None:
    """Promise 3 where a library does the sum: to float tolerance."""
    for name, compression in {**DENSE, "DGC": DGC(0.1)}.items():
        recipe = simulated_recipe("Nesterov", compression)
        mine = Replica(recipe, comm)
        train([mine], range(4))
        assert_same_on_all_ranks(comm, mine.parameters, name)
        if comm.rank == 0:
            simulated = [Replica(recipe, other) for other in dgcopt.simulated_world(comm.size)]
            train(simulated, range(4))
            tolerance = {"FP16": 2e-3, "BF16": 2e-2}.get(name, 1e-5)
            assert_close(mine.parameters, simulated[0].parameters, tolerance, name)


def library_on_real_ranks(name: str, comm: Comm) -> None:
    """As simulated ranks do, with as many bytes, and all ranks with the same bits."""
    as_on_simulated_ranks(name, *LIBRARY[name], comm)


def as_on_simulated_ranks(
    name: str, compression: Compressor, make: Callable[..., torch.optim.Optimizer], comm: Comm
) -> None:
    recipe = Recipe(
        lambda named: make([param for _, param in named]), compression=compression, buckets=(*TINY.items(),)
    )
    mine = Replica(recipe, comm)
    for step in range(5):
        train([mine], [step])
        assert_same_on_all_ranks(comm, mine.parameters, f"{name} after step {step}")
    sent: Any = mine.optimizer
    here = comm.run(AllGather(torch.tensor([sent.telemetry.payload_bytes]), label="bytes of all")).flatten().tolist()
    if comm.rank > 0:  # whose bits are those of rank 0, and who need not simulate all ranks, too
        return
    others = dgcopt.simulated_world(comm.size, comm.nodes)
    for other in others:
        other.link = comm.link  # so that they choose alike
    simulated = [Replica(recipe, other) for other in others]
    train(simulated, range(5))
    tolerance = 1e-2 if name.startswith("BF16") else 1e-9
    assert_close(mine.parameters, simulated[0].parameters, tolerance, name)
    optimizers: list[Any] = [rank.optimizer for rank in simulated]
    there = [optimizer.telemetry.payload_bytes for optimizer in optimizers]
    alike = not name.startswith("BF16")  # not every wire has an allreduce of bfloat16
    assert here == there or not alike, f"{here} bytes went out of each rank, {there} of simulated ones"


def nothing_is_lost(compression: Any, comm: Comm) -> None:
    """Promise 1: N times the averaged updates, plus all residuals, is the sum of all local gradients.

    Through ratio warm-up, two passes per step, gradients that are not set to None, parameters that are frozen and
    unfrozen, a parameter group that comes later, a parameter that one rank does not use, and state saved and loaded.
    """
    model = make_model()
    later = make_model(seed=5)
    lr = 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr)
    mine = Replica(
        Recipe(lambda named: optimizer, model=lambda: model, compression=compression, buckets=(*TINY.items(),)), comm
    )
    names = {param: name for name, param in model.named_parameters()}
    names |= {param: f"group1.parameter{place}" for place, param in enumerate(later.parameters())}
    local = {param: torch.zeros_like(param) for param in names}
    start = {param: param.detach().clone() for param in names}
    optimizer.set_backward_passes_per_step(2)  # type: ignore[attr-defined]
    for step in range(12):
        if step == 3:
            model[2].weight.requires_grad_(False)
        if step == 5:
            optimizer.add_param_group({"params": list(later.parameters()), "lr": lr})
        if step == 7:
            model[2].weight.requires_grad_(True)
            model[0].bias.requires_grad_(False)
        if step == 9:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            loss = mine.loss(step, micro)
            if step >= 5 and not (comm.rank == comm.size - 1 and step % 3 == 0):
                x, y = batch(step, micro, comm)
                loss = loss + nn.functional.mse_loss(later(x), y)
            wanted = [param for param in names if param.requires_grad]
            grads = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            for param, grad in zip(wanted, grads, strict=True):
                if grad is not None:
                    local[param] += grad
            loss.backward()
        optimizer.step()

    residuals = memory_of(optimizer)["residual"]
    assert set(residuals) <= set(names.values())
    held_back = 0.0
    for param, name in names.items():
        residual = residuals.get(name, torch.zeros_like(param))  # vectors that are sent whole have none
        held_back = max(held_back, float(residual.abs().max()))
        sums = comm.run(AllReduce(torch.stack([residual, local[param]]), op="sum", label=f"check of {name}"))
        updates = (start[param] - param.detach()) / lr * comm.size
        assert_close([updates + sums[0]], [sums[1]], 1e-9, name)
        assert sums[1].abs().max() > 0.1, f"{name} was not trained"
    assert held_back > 0.01, "nothing was held back, so nothing was tested"


def ranks_agree_on_the_link(comm: Comm) -> None:
    """It is measured once, each for itself, and is the same everywhere; so all choose alike."""
    assert comm.link is None
    mine = Replica(
        Recipe(
            lambda named: OPTIMIZERS["Nesterov"]([param for _, param in named]),
            compression=DGC(0.05, reduce="auto"),
            buckets=(*TINY.items(),),
        ),
        comm,
    )
    for step in range(3):
        train([mine], [step])
        assert_same_on_all_ranks(comm, mine.parameters, f"reduce='auto' after step {step}")
        link = comm.link
        assert link is not None and 0 < link.latency < 10 and 1e3 < link.bandwidth < 1e12
        told = gather_text(comm, f"{link.latency!r} {link.bandwidth!r}".ljust(64))
        assert len(set(told)) == 1, told


AS_SIMULATED: dict[str, Callable[[Comm], Any]] = {
    f"simulated: {name}": functools.partial(simulated_ranks_equal_real_ones, how) for name, how in SPARSE.items()
}
REPLICAS: dict[str, Callable[[Comm], Any]] = {
    f"replicas: {name}": functools.partial(replicas_stay_identical, how) for name, how in {**DENSE, **SPARSE}.items()
}
for name in SPARSE.keys() - {"DGC", "DGC, owner"}:  # whose bits AS_SIMULATED has on every wire
    only(wires=["torch"])(REPLICAS[f"replicas: {name}"])

SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    **AS_SIMULATED,
    **REPLICAS,
    **{f"library: {n}": functools.partial(library_on_real_ranks, n) for n in LIBRARY},
    "the link": ranks_agree_on_the_link,
    "simulated: dense": simulated_ranks_are_close_to_real_ones,
    "nothing is lost": functools.partial(nothing_is_lost, DGC(0.02, warmup=WARMUP)),
    "nothing is lost: fp16": functools.partial(nothing_is_lost, DGC(0.02, values="fp16", vectors="sparse")),
    "nothing is lost: bf16": functools.partial(nothing_is_lost, DGC(0.3, values="bf16", vectors="sparse")),
}
