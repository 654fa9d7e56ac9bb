"""Weights stay finite: large gradients of half precision do not overflow, and damaged messages are not applied."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Broadcast
from dgcopt.compressors import Compressor
from dgcopt.compressors.context import largest_addend
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, same, small_model

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
    "CSC": dgcopt.CSC(0.5, chunk=64),
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
def test_clamped_excess_is_in_the_residual(name: str, op: Any) -> None:
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


def test_excess_of_a_dense_vector_is_clamped_and_not_kept() -> None:
    """Of DGC's momentum in half precision: there is no residual of what an allreduce carries whole."""
    model = functools.partial(small_model, torch.float16)
    ranks = Ranks(SIZE, lambda p: torch.optim.SGD(p, lr=2.0**-20, momentum=0.9), model, compression=dgcopt.DGC(0.1))
    momentum = 0.0
    for gradient in (6e4, 6e4, -6e4):
        set_gradients(ranks, gradient)
        for optimizer in ranks.optimizers:
            optimizer.step()
        momentum = 0.9 * momentum + gradient
        applied = min(momentum, SIZE * largest_addend(torch.float16, SIZE))
        for rank, optimizer in enumerate(ranks.optimizers):
            residual = synchronised(optimizer).engine.store.memory().get("residual", {})
            vectors = {name: param for name, param in ranks.models[rank].named_parameters() if param.dim() == 1}
            assert not vectors.keys() & residual.keys()
            for vector in vectors.values():
                assert vector.grad is not None
                torch.testing.assert_close(
                    vector.grad.float(), torch.full(vector.shape, applied), rtol=1e-3, atol=0, msg=f"{applied}"
                )
    assert momentum == pytest.approx(42600), "the last one would be cut, had the second one's excess been kept"


Damage = Callable[[Tensor], None]


def all_bits(message: Tensor) -> None:
    """NaN in every code of numbers; counts and positions become negative."""
    message.view(-1).view(torch.uint8).fill_(0xFF)


def exponents(message: Tensor) -> None:
    """NaN or Inf in place of float32 values, which lie behind positions; any other values instead of coded ones."""
    words = message.view(-1).view(torch.uint8)
    words = words[len(words) * 3 // 5 // 4 * 4 : len(words) // 4 * 4].view(torch.int32)
    words |= 0x7F800000


def strike(comm: dgcopt.Comm, number: int, damage: Damage) -> list[Any]:
    """Damage one message of gradients that a rank sends from now on, by its number; returns all that it sends.

    Of messages to several owners only that to rank 2 from rank 1, or to the first machine.
    """
    start, sent = comm.start, list[Any]()

    def changed(collective: Any) -> Any:
        if " round " in collective.label and not (isinstance(collective, Broadcast) and collective.root != comm.rank):
            if len(sent) == number:
                to_owners = isinstance(collective, AllToAll)
                damage(collective.tensor[2 if comm.rank == 1 else 0] if to_owners else collective.tensor)
            sent.append(collective)
        return start(collective)

    comm.start = changed  # type: ignore[method-assign]
    return sent


def kept(ranks: Ranks, memory: bool = True) -> list[dict[str, Any]]:
    """Weights, the optimizer's state and the number of steps by rank; `memory` is all that the compressor keeps."""
    return [
        {
            "weights": [param.detach().clone() for param in model.parameters()],
            "state": copy.deepcopy(optimizer.state_dict()["state"]),
            "step": (engine := synchronised(optimizer).engine).step,
            "memory": copy.deepcopy(engine.store.state()) if memory else None,
        }
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True)
    ]


def finish_step(ranks: Ranks, seed: int) -> list[dgcopt.DGCError]:
    """A step that may fail; returns each rank's error."""
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(seed)
    errors = []
    for optimizer in ranks.optimizers:
        try:
            optimizer.step()
        except dgcopt.DGCError as error:
            errors.append(error)
    return errors


STRUCK: dict[str, Compressor] = {
    **{name: one for name, one in SETTINGS.items() if "unbiased" not in name},
    **OWNERS,
    "DGC overlap": dgcopt.DGC(0.1, overlap=True),
    "DGC compact overlap": dgcopt.DGC.compact(0.1, warmup=None, overlap=True),
    "DGC owner overlap": dgcopt.DGC(0.1, reduce="owner", vectors="fp32", overlap=True),
    "DGC compact owner": dgcopt.DGC.compact(0.1, warmup=None, reduce="owner", overlap=True),
    "TopK owner int8": dgcopt.TopK(0.1, values="int8", reduce="owner"),
    "TopK owner keep all": dgcopt.TopK(0.1, reduce="owner", keep=math.inf),
    "TopK owner decay": dgcopt.TopK(0.1, reduce="owner", decay=0.5),
    "QAdam TopK": dgcopt.QAdam(1, dgcopt.TopK(0.1)),
    "OneBitAdam Threshold": dgcopt.OneBitAdam(1, dgcopt.Threshold(0.01)),
    "DeMo": dgcopt.DeMo(),
    "DeMo fp32": dgcopt.DeMo(values="fp32"),
    "DeMo fp32 values": dgcopt.DeMo(values="fp32", sign=False),
    "ByteGrad": dgcopt.ByteGrad(),
    "ByteGrad error feedback": dgcopt.ByteGrad(error_feedback=True),
    "1-bit": dgcopt.OneBitReduce(),
    "Adasum": dgcopt.Adasum(),
    "Adasum FP16": dgcopt.Adasum(torch.float16),
    "PowerSGD": dgcopt.PowerSGD(start_step=0),
    "PowerSGD rank 2": dgcopt.PowerSGD(2, start_step=0, min_compression_rate=1),
}
ABSORBS = [name for name, one in STRUCK.items() if isinstance(one, dgcopt.DGC) and one.overlap != True]  # noqa: E712
"""Before messages leave, memory takes the gradient in, and keeps it if the step is aborted."""


def struck_world(name: str) -> Ranks:
    momentum = 0.0 if isinstance(STRUCK[name], dgcopt.DeMo) else 0.9
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum, weight_decay=0.01)
    ranks = Ranks(
        *(SIZE, functools.partial(torch.optim.AdamW, lr=0.01) if "Adam" in name else make),
        functools.partial(small_model, torch.float32),
        compression=copy.deepcopy(STRUCK[name]),
        **{"bucket_mb": 2e-3, "first_bucket_mb": 2e-3},
    )
    ranks.step(0)
    ranks.step(1)
    return ranks


@pytest.mark.parametrize("damage", [all_bits, exponents], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", STRUCK)
def test_a_damaged_message_ends_the_step_on_all_ranks_alike(
    name: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Each message of a step in turn. Afterwards all is as before, and the next step works."""
    ended, number, messages = 0, 0, 1
    while number < messages:
        ranks = struck_world(name)
        before = kept(ranks, name not in ABSORBS)
        sent = strike(ranks.comms[1], number, damage)
        caplog.clear()
        errors = finish_step(ranks, 2)
        struck = len(sent)
        told = f"{sent[number].describe()}: {errors}"
        skipped = [optimizer.telemetry.skipped for optimizer in ranks.optimizers]
        if errors or any(skipped):
            assert [type(error) for error in errors] == [dgcopt.PayloadError] * SIZE or skipped == [1] * SIZE, told
            for rank, (now, then) in enumerate(zip(kept(ranks, name not in ABSORBS), before, strict=True)):
                if STRUCK[name].source == "update":  # the optimizer has made its update by then
                    now["state"] = then["state"]
                assert same(now, then), f"{told}, rank {rank}: {[key for key in now if not same(now[key], then[key])]}"
            if not isinstance(sent[number], AllReduce):  # a sum has no sender
                words = [*map(str, errors), *(record.getMessage() for record in caplog.records if not errors)]
                assert words and all("rank 1" in word or "rank(s) 1" in word for word in words), words
            ended += 1
        elif damage is all_bits and sent[number].tensor.dtype != torch.int64:  # of counts the largest is true
            raise AssertionError(f"{told} was not noticed")
        assert finish_step(ranks, 3) == [], told
        messages = len(sent) - struck  # of a step that nothing has ended early
        assert struck <= messages, told
        ranks.assert_replicas_equal()
        for optimizer, held in zip(ranks.optimizers, kept(ranks), strict=True):
            assert synchronised(optimizer).engine.step == 2 + (not errors and not any(skipped)) + 1, told
            assert all(bool(x.isfinite().all()) for x in tensors_in(held)), told
        number += 1
    assert ended or damage is exponents


MACHINES: dict[str, Compressor] = {
    "dense": dgcopt.NoCompression(),
    "BF16": dgcopt.BF16(),
    "DGC": dgcopt.DGC(0.1),
    "DGC compact": dgcopt.DGC.compact(0.1, warmup=None),
    "TopK owner": dgcopt.TopK(0.1, reduce="owner"),
    "PowerSGD": dgcopt.PowerSGD(start_step=0),
    "CSC": dgcopt.CSC(0.5, chunk=64),
}


def machines_struck(name: str, number: int, damage: Damage) -> tuple[Ranks, list[Any]]:
    """Two machines of two ranks, and all that the first rank of the second one sends, of which a message is damaged."""
    ranks = Ranks(
        *(SIZE, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        *(functools.partial(small_model, torch.float32), 2),
        compression=dgcopt.Hierarchical(copy.deepcopy(MACHINES[name])),
    )
    ranks.step(0)
    ranks.step(1)
    return ranks, strike(ranks.comms[2], number, damage)


@pytest.mark.parametrize("damage", [all_bits, exponents], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", MACHINES)
def test_a_damaged_message_between_machines_ends_the_step_on_all_their_ranks(name: str, damage: Damage) -> None:
    """Each message of a step in turn, but that of the first ranks to those of their machine.

    Codes that make zero of NaN carry none of a mean's to other machines, which notice one step later then.
    """
    number = ended = 0
    while True:
        ranks, sent = machines_struck(name, number, damage)
        before = kept(ranks)
        errors = finish_step(ranks, 2)
        if number >= len(sent):
            break
        told = f"{sent[number].describe()}: {errors}"
        skipped = [optimizer.telemetry.skipped for optimizer in ranks.optimizers]
        if errors or any(skipped):
            is_noticed_later = skipped == [0, 0, 1, 1] and sent[number].group == "node"
            if not is_noticed_later:
                assert [type(error) for error in errors] == [dgcopt.PayloadError] * SIZE or skipped == [1] * SIZE, told
            if name == "DGC" and damage is all_bits and isinstance(sent[number], AllGather):
                assert len(errors) == SIZE, "negative positions were skipped like NaN"
                assert all(f"rank {rank}: " in str(error) for rank, error in enumerate(errors))
            for rank, (now, then) in enumerate(zip(kept(ranks), before, strict=True)):
                if is_noticed_later and rank < 2:
                    continue
                assert same(now, then), f"{told}, rank {rank}: {[key for key in now if not same(now[key], then[key])]}"
            ended += 1
            if is_noticed_later:
                assert {type(error) for error in finish_step(ranks, 3)} == {dgcopt.MismatchError}
                number += 1
                continue
        elif damage is all_bits and sent[number].tensor.is_floating_point():
            raise AssertionError(f"{told} was not noticed")
        assert finish_step(ranks, 3) == [], told
        ranks.assert_replicas_equal()
        assert all(bool(x.isfinite().all()) for held in kept(ranks) for x in tensors_in(held)), told
        number += 1
    assert ended or damage is exponents


def test_a_damaged_broadcast_ends_the_step_on_the_ranks_of_its_machine_and_others_notice() -> None:
    ranks = machines_struck("dense", 10**6, all_bits)[0]
    start = ranks.comms[2].start

    def changed(collective: Any) -> Any:
        if isinstance(collective, Broadcast) and " round " in collective.label:
            all_bits(collective.tensor)
        return start(collective)

    ranks.comms[2].start = changed  # type: ignore[method-assign]
    before = kept(ranks)
    assert finish_step(ranks, 2) == []
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [0, 0, 1, 1]
    assert all(same(now, then) for now, then in zip(kept(ranks)[2:], before[2:], strict=True))
    assert {type(error) for error in finish_step(ranks, 3)} == {dgcopt.MismatchError}


@pytest.mark.parametrize("name", ["NoCompression", "FP16", "QSGD"])
def test_weights_that_are_not_finite_are_an_error_of_the_next_step(name: str) -> None:
    """A dense sum is not looked at before it is applied; else all later steps would be skipped."""
    ranks = Ranks(2, sgd, functools.partial(small_model, torch.float32), compression=getattr(dgcopt, name)())
    for model in ranks.models:
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan
    errors = finish_step(ranks, 0)
    assert [type(error) for error in errors] == [dgcopt.DivergenceError] * 2
    for rank, error in enumerate(errors):
        assert str(error).startswith(f"rank {rank}, step 0: parameter '0.weight' holds NaN or Inf (1 of 6 parameters")


@pytest.mark.parametrize(
    ("compressor", "dtype"),
    [
        (dgcopt.FP16(), torch.float32),
        (dgcopt.FP16(), torch.float16),
        (dgcopt.BF16(), torch.float16),
        (dgcopt.NoCompression(), torch.float16),
        (dgcopt.PowerSGD(), torch.float16),
        (dgcopt.Hierarchical(), torch.float16),
    ],
    ids=str,
)
def test_no_rank_takes_a_step_in_which_finite_gradients_exceed_float16(compressor: Any, dtype: torch.dtype) -> None:
    ranks = Ranks(2, sgd, functools.partial(small_model, dtype), compression=compressor, op="sum")
    before = kept(ranks, memory=False)
    set_gradients(ranks, 4e4)
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]
    assert all(same(now, then) for now, then in zip(kept(ranks, memory=False), before, strict=True))


def test_norms_of_chunks_stay_in_the_range_of_float16() -> None:
    compressor = dgcopt.FP16(dgcopt.CSC(1.0, chunk=1024, warmup=None))
    ranks = Ranks(4, sgd, functools.partial(small_model, torch.float32), compression=compressor)
    set_gradients(ranks, 50.0)
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [0] * 4


def test_chunks_with_norms_beyond_float32_are_sent() -> None:
    ranks = Ranks(2, sgd, functools.partial(small_model, torch.float32), compression=dgcopt.CSC(0.5, chunk=64))
    for comm in ranks.comms:
        wire_that_adds_first(comm)
    set_gradients(ranks, 1e38)
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [0, 0]


def test_a_gradient_that_is_not_finite_is_no_error_while_weights_are() -> None:
    ranks = Ranks(2, sgd, functools.partial(small_model, torch.float32), compression=dgcopt.NoCompression())
    set_gradients(ranks, torch.inf)
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]


def test_weights_that_are_not_finite_are_a_warning_where_divergence_is(caplog: pytest.LogCaptureFixture) -> None:
    model = functools.partial(small_model, torch.float32)
    ranks = Ranks(2, sgd, model, compression=dgcopt.NoCompression(), on_divergence="warn")
    for replica in ranks.models:
        with torch.no_grad():
            next(replica.parameters())[0, 0] = torch.nan
    assert finish_step(ranks, 0) == []
    assert sum("(1 of 6 parameters do)" in record.getMessage() for record in caplog.records) == 2


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class AnythingInGaps(Compressor):
    """Leaves NaN behind the parameters, on some ranks."""

    def exchange(self, grad, ctx):
        mean = yield AllReduce(grad, op=ctx.op)
        result = torch.full_like(mean, math.nan if ctx.rank % 2 else 0.0)
        for segment in ctx.segments:
            segment.view(result).copy_(segment.view(mean))
        return result


def test_the_gaps_of_a_result_abort_no_step_of_machines() -> None:
    ranks = Ranks(SIZE, sgd, nodes=2, compression=dgcopt.Hierarchical(AnythingInGaps()))
    for seed in range(2):
        ranks.step(seed)
    assert not any(optimizer.telemetry.skipped for optimizer in ranks.optimizers)
    ranks.assert_replicas_equal()


def test_the_gaps_of_a_result_skip_no_round() -> None:
    models = [small_model() for _ in range(SIZE)]
    optimizers: list[Any] = [
        dgcopt.DiLoCo(every=1, compression=AnythingInGaps()).attach(sgd(model.parameters()), comm=comm)
        for model, comm in zip(models, dgcopt.simulated_world(SIZE), strict=True)
    ]
    for model in models:
        sum(param.square().sum() for param in model.parameters()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(optimizer.averaging.telemetry.skipped for optimizer in optimizers)
    assert all(same([*model.parameters()], [*models[0].parameters()]) for model in models)
