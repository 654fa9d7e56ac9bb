"""Weights stay finite: large gradients of half precision do not overflow, and damaged messages are not applied."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import Ranks, raw, small_model

import dgcopt
from dgcopt.compressors import Compressor
from dgcopt.compressors.context import largest_addend
from dgcopt.gradients.optimizer import synchronised

SIZE = 4
OWNERS: dict[str, Compressor] = {
    "DGC owner": dgcopt.DGC(0.1, reduce="owner"),
    "TopK owner": dgcopt.TopK(0.1, reduce="owner"),
}
SETTINGS: dict[str, Compressor] = {
    "DGC": dgcopt.DGC(0.1),
    "DGC compact": dgcopt.DGC.compact(0.1, warmup=None),
    "DGC ratio 1": dgcopt.DGC(1.0),
    "DGC partition": dgcopt.DGC(0.1, reduce="partition"),
    "TopK": dgcopt.TopK(0.1),
    "CLTK": dgcopt.CLTK(0.1),
    "RandomK": dgcopt.RandomK(0.1),
    "RandomK unbiased": dgcopt.RandomK(0.1, unbiased=True, error_feedback=False),
    "Threshold": dgcopt.Threshold(0.01),
    "ChunkedTopK": dgcopt.ChunkedTopK(),
}
POWER: dict[str, Compressor] = {"PowerSGD": dgcopt.PowerSGD(start_step=0)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2.0**-10)


def wire_that_adds_first(comm: dgcopt.Comm) -> None:
    """Let averages overflow as they do where a sum of half precision is divided after it."""
    start = comm.start

    def changed(collective: Any) -> Any:
        handle = start(collective)
        if getattr(collective, "op", "") == "average" and collective.tensor.dtype == torch.float16:
            result = handle.result

            def divided() -> Tensor:
                tensor = result()
                return tensor.copy_(tensor * SIZE / SIZE)

            handle.result = divided
        return handle

    comm.start = changed  # type: ignore[method-assign]


def set_gradients(ranks: Ranks, value: float) -> None:
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        optimizer.zero_grad()
        torch.stack([(param.float() * value).sum() for param in model.parameters()]).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("name", [*SETTINGS, *OWNERS, *POWER])
def test_large_gradients_of_half_precision_do_not_overflow_on_the_way(name: str, op: Any, dtype: torch.dtype) -> None:
    """Their dense average, or sum, is finite; what waits adds up to more than the dtype holds."""
    compressor = {**SETTINGS, **OWNERS, **POWER}[name]
    model = functools.partial(small_model, dtype)
    ranks = Ranks(SIZE, sgd, model, compression=compressor, op=op)
    for comm in ranks.comms:
        wire_that_adds_first(comm)
    for number in range(6):
        set_gradients(ranks, (3e4 if op == "average" else 1.5e4) * (-1) ** (number // 3))
        for optimizer in ranks.optimizers:
            optimizer.step()
    ranks.assert_replicas_equal()
    assert all(bool(weight.isfinite().all()) for weight in ranks.weights())
    assert all(optimizer.telemetry.skipped == 0 for optimizer in ranks.optimizers)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_as_many_of_the_largest_addend_as_there_are_ranks_add_up_to_a_finite_sum(dtype: torch.dtype, size: int) -> None:
    most = torch.tensor(largest_addend(dtype, size), dtype=dtype)
    total = functools.reduce(torch.add, [most] * size)
    assert total.isfinite()
    following = most.nextafter(torch.tensor(torch.inf, dtype=dtype))
    assert not following.isfinite() or following.double() * size > torch.finfo(dtype).max


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("name", ["RandomK", "CLTK", "DGC partition", "DGC ratio 1"])
def test_what_was_clamped_is_in_the_residual(name: str, op: Any) -> None:
    """What one rank has sent, and what it keeps, add up to its gradients: twice as large as the dtype holds."""
    bucket_grad, compressor = 6e4, SETTINGS[name]
    model = functools.partial(small_model, torch.float16)
    ranks = Ranks(SIZE, lambda p: torch.optim.SGD(p, lr=0.0), model, compression=compressor, op=op)
    received: dict[str, Tensor] = {}
    for number in range(3):
        set_gradients(ranks, bucket_grad)
        for optimizer in ranks.optimizers:
            optimizer.step()
        for key, param in ranks.models[0].named_parameters():
            if param.grad is not None and param.dim() > 1:
                received[key] = received.get(key, torch.zeros(param.shape)) + param.grad.float()
        given = (number + 1) * bucket_grad * (1 if op == "average" else SIZE)
        for key, got in received.items():
            waits = sum(
                synchronised(o).engine.store.memory()["residual"].get(key, torch.zeros_like(got)).view_as(got)
                for o in ranks.optimizers
            )
            total = got + waits / (SIZE if op == "average" else 1)
            assert torch.allclose(total, torch.full_like(total, given), rtol=1e-3), (number, key)


def damage_floats(comm: dgcopt.Comm, struck: list[str]) -> None:
    """Set all exponent bits of some numbers of the next message of gradients: of float32, or of scales in bfloat16."""
    start = comm.start

    def changed(collective: Any) -> Any:
        tensor = collective.tensor
        if not struck and " round " in collective.label and tensor.numel() and tensor.dtype != torch.int64:
            if tensor.is_floating_point():
                tensor.view(-1)[0] = torch.nan
            else:  # values lie behind positions
                words = tensor.view(-1)[-8:].view(torch.int32)
                words |= 0x7F800000
            struck.append(collective.describe())
        return start(collective)

    comm.start = changed  # type: ignore[method-assign]


def state_of(ranks: Ranks) -> list[dict[str, bytes]]:
    return [
        {
            **{name: raw(param) for name, param in model.named_parameters()},
            **{
                f"{kind} {name}": raw(held)
                for kind, by_name in synchronised(optimizer).engine.store.memory().items()
                for name, held in by_name.items()
            },
        }
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True)
    ]


@pytest.mark.parametrize("name", ["DGC", "DGC ratio 1", "DGC partition", "TopK", "CLTK", "RandomK"])
def test_nan_or_inf_that_arrives_ends_the_step_on_all_ranks_alike(name: str) -> None:
    model = functools.partial(small_model, torch.float32)
    ranks = Ranks(SIZE, sgd, model, compression=SETTINGS[name])
    ranks.step(0)
    before = state_of(ranks)
    struck: list[str] = []
    damage_floats(ranks.comms[1], struck)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(1)
    errors = []
    for optimizer in ranks.optimizers:
        try:
            optimizer.step()
        except dgcopt.PayloadError as error:
            errors.append(error)
    assert struck
    assert len(errors) in (0, SIZE), errors
    if not errors:
        assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1] * SIZE
    after = state_of(ranks)
    for rank in range(SIZE):
        weights = {key for key, _ in ranks.models[rank].named_parameters()}
        assert all(after[rank][key] == before[rank][key] for key in weights), "weights have changed"
        finite = synchronised(ranks.optimizers[rank]).engine.store.memory()
        assert all(bool(held.isfinite().all()) for kind in finite.values() for held in kind.values())
    ranks.assert_replicas_equal()
