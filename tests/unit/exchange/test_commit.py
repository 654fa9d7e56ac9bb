"""A step happens entirely or not at all on a rank, wherever it is interrupted."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllGather, Broadcast, Collective
from dgcopt.compressors import Compressor
from dgcopt.exchange.commit import CommitMarker, FinishedExchange, NotFinite, inspect
from dgcopt.exchange.scheduler import PendingExchange, context_of
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.flat.store import Store
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, same, small_model

PACKAGE = str(Path(dgcopt.__file__).parent)
Place = tuple[str, int, int]
"""A line that is executed: its file, its number, and whether for the first time, the second, ... in a step."""

SETTINGS: dict[str, tuple[Compressor, dict[str, Any]]] = {
    "one pass": (dgcopt.DGC.compact(0.1, warmup=None), {}),
    "while backward runs": (dgcopt.DGC(0.1, overlap=True), {"bucket_mb": 1e-3, "first_bucket_mb": 1e-3}),
    "owners": (dgcopt.TopK(0.1, values="int8", reduce="owner"), {}),
    "owners of vectors": (dgcopt.DGC.compact(0.1, warmup=None, reduce="owner", overlap=True), {}),
    "dense": (dgcopt.NoCompression(), {}),
    "updates": (dgcopt.TopK(0.1, source="update"), {}),
}


OFFSETS = {name: number for number, name in enumerate(SETTINGS)}
EVERY = int(os.environ.get("DGCOPT_TEST_LINES", 41))
"""Of the lines that a step executes every so many are tried, other ones in each setting; 1 tries all."""


def make(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def trained(name: str) -> Ranks:
    """Two ranks after two steps, and a third one's gradients set to zero."""
    compressor, settings = SETTINGS[name]
    ranks = Ranks(2, make, functools.partial(small_model, torch.float32), compression=compressor, **settings)
    ranks.step(0)
    ranks.step(1)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    return ranks


def third(ranks: Ranks) -> list[BaseException]:
    """A step, in which each rank goes on by itself where another one has failed; returns the errors."""
    try:
        ranks.backward(2)
    except BaseException as error:
        return [error]
    errors: list[BaseException] = []
    for again in (False, True):
        for optimizer in ranks.optimizers:
            try:
                # on this wire another rank may have exchanged a step, which is then to be finished
                if not again or synchronised(optimizer).engine.moved_on:
                    optimizer.step()
            except BaseException as error:
                errors.append(error)
    return errors


def kept(ranks: Ranks, rank: int) -> dict[str, Any]:
    """What a rank has of each parameter, and the number of its steps, by name."""
    engine = synchronised(ranks.optimizers[rank]).engine
    memory = engine.store.memory()
    state: dict[str, Any] = {"step": engine.step}
    for name, param in ranks.models[rank].named_parameters():
        held = {kind: by_name[name] for kind, by_name in memory.items() if name in by_name and by_name[name].any()}
        state[name] = (param.detach().clone(), held)
    return state


@contextmanager
def traced(see: Callable[[Place], object]) -> Iterator[None]:
    """Within it, `see` is called before each line of dgcopt that is executed."""
    counts: dict[tuple[str, int], int] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            counts[line] = counts.get(line, 0) + 1
            see((*line, counts[line]))
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def places(name: str) -> list[Place]:
    """Where a step of both ranks can be interrupted: each line, when it is executed first and last."""
    seen: dict[tuple[str, int], int] = {}
    ranks = trained(name)
    with traced(lambda place: seen.__setitem__(place[:2], place[2])):
        third(ranks)
    return sorted({(*line, count) for line, last in seen.items() for count in (1, last)})


def held_back(name: str) -> list[dict[str, Any]]:
    """What ranks have after a step whose messages could not leave: memory may have taken the gradients in."""
    ranks = trained(name)
    for optimizer in ranks.optimizers:
        synchronised(optimizer).engine.gradients.wait_for_vote()  # until all ranks have agreed on the step
    for comm in ranks.comms:
        comm.wait = refusing(comm.wait)  # type: ignore[method-assign]
    third(ranks)
    return [kept(ranks, rank) for rank in range(2)]


def refusing(wait: Callable[[Any], Any], what: type[Collective] = Collective) -> Callable[[Any], Any]:
    def refuse(handle: Any) -> Any:
        if " round " in handle.collective.label and isinstance(handle.collective, what):
            raise dgcopt.CommError("refused")
        return wait(handle)

    return refuse


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_that_is_interrupted_has_happened_or_not_and_the_next_one_works_or_says_why_not(name: str) -> None:
    """By an exception before any line of the package. Where the gradient is taken into memory before it is sent, it may
    wait there instead."""
    ranks = trained(name)
    before = [kept(ranks, rank) for rank in range(2)]
    third(ranks)
    after, waiting = [kept(ranks, rank) for rank in range(2)], held_back(name)
    every = places(name)[OFFSETS[name] :: EVERY]
    assert len(every) > 20
    wrong = []
    for number, place in enumerate(every):
        error = (MemoryError, KeyboardInterrupt, RuntimeError)[number % 3]("injected")

        def see(here: Place, place: Place = place, error: BaseException = error) -> None:
            if here == place:
                raise error

        ranks = trained(name)
        with traced(see):
            raised = third(ranks)
        wrong += [(place, repr(e)) for e in raised if e is not error and not isinstance(e, dgcopt.DGCError)]
        states = [kept(ranks, rank) for rank in range(2)]
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        refusals = third(ranks)
        if not any(each is error for each in (*raised, *refusals)) and not raised:
            wrong.append((place, "no error"))
        if any(refusal is error for refusal in refusals):  # kept for the other rank, which had been moved on
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            refusals = third(ranks)
        wrong += [(place, f"then {e!r}") for e in refusals if not isinstance(e, dgcopt.DGCError)]
        said = any("restore all ranks from a checkpoint" in str(refusal).lower() for refusal in refusals)
        for rank, state in enumerate(states):
            has = [is_one_of(state[key], before[rank][key], waiting[rank][key]) for key in state]
            if not (all(has) or same(state, after[rank]) or said):
                wrong.append((place, f"rank {rank} is between two steps: {refusals}"))
        if not refusals and not all(same(*pair) for pair in zip(ranks.weights(0), ranks.weights(1), strict=True)):
            wrong.append((place, "replicas differ"))
    text = "\n".join(f"{Path(file).name}:{line} ({count}): {what}" for (file, line, count), what in wrong)
    assert not wrong, f"{len(wrong)} of {len(every)}\n{text}"


def is_one_of(what: Any, *others: Any) -> bool:
    return any(same(what, other) for other in others)


def in_flight(comm: dgcopt.Comm, change: Callable[[Tensor], None]) -> None:
    """Let `change` have every message of compressed gradients that a rank sends from now on."""
    start = comm.start

    def changed(collective: Any) -> Any:
        if " round " in collective.label and collective.tensor.dtype == torch.uint8:
            change(collective.tensor)
        return start(collective)

    comm.start = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("compressor", [dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.DGC(0.1, overlap=True)])
def test_a_position_between_two_parameters_is_refused_on_all_ranks_before_anything_has_changed(compressor) -> None:
    """Segments lie on 64-element boundaries: what is behind the last one is within the bucket, and in no parameter."""

    def name_the_gap(message: Tensor) -> None:
        count = len(message) // 8
        message[: 4 * count].view(torch.int32)[count - 1] = (
            synchronised(ranks.optimizers[0]).engine.layout.buckets[-1].numel - 1
        )

    ranks = Ranks(2, make, functools.partial(small_model, torch.float32), compression=compressor)
    ranks.step(0)
    before = [kept(ranks, rank) for rank in range(2)]
    start = ranks.comms[1].start
    in_flight(ranks.comms[1], name_the_gap)
    errors = third(ranks)
    assert [type(error) for error in errors] == [dgcopt.PayloadError] * 2, errors
    assert all("from rank 1 names a position of bucket" in str(error) for error in errors), errors
    ranks.comms[1].start = start  # type: ignore[method-assign]
    waits = compressor.overlap is not True and isinstance(compressor, dgcopt.DGC)
    for rank, state in enumerate(before):
        now = kept(ranks, rank)
        assert all(same(now[name][0], state[name][0]) for name in state if name != "step") and now["step"] == 1
        assert same(now, state) != waits, "where the gradient is taken into memory before it is sent, it waits there"
    ranks.step(1)
    ranks.assert_replicas_equal()


def refused_step(
    compressor: dgcopt.Compressor, make: Callable[..., torch.optim.Optimizer], what: type[Collective] = Collective
) -> tuple[Ranks, list[dict[str, Any]]]:
    """Two ranks whose third step has failed on the wire, after the vote, and what they had before it."""
    ranks = Ranks(2, make, functools.partial(small_model, torch.float32), compression=compressor)
    ranks.step(0)
    ranks.step(1)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    before = [kept(ranks, rank) for rank in range(2)]
    for comm in ranks.comms:
        comm.wait = refusing(comm.wait, what)  # type: ignore[method-assign]
    assert third(ranks)
    return ranks, before


@pytest.mark.parametrize(
    ("compressor", "refused"),
    [
        (dgcopt.DGC(0.1), AllGather),
        (dgcopt.PerParameter({"2.*": dgcopt.DGC(0.1, clip=dgcopt.LocalClip(1.0)), "*": dgcopt.DGC(0.1)}), AllGather),
        (dgcopt.Hierarchical(dgcopt.DGC(0.1, vectors="sparse")), Broadcast),
    ],
)
def test_a_gradient_that_memory_has_absorbed_counts_once(compressor, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory, or still in `param.grad`: a machine's mean is in both, if memory of its first rank had it."""
    monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 2**12)  # copied, as one that is read in place is zero anyway
    ranks, before = refused_step(compressor, make, refused)
    for rank, model in enumerate(ranks.models):
        now = kept(ranks, rank)
        for name, param in model.named_parameters():
            absorbed = not same(now[name], before[rank][name])
            assert absorbed != bool(param.grad.any()), (rank, name)
            assert absorbed == (param.dim() > 1 and not isinstance(compressor, dgcopt.Hierarchical)), (rank, name)


def test_memory_that_has_absorbed_a_part_of_a_gradient_is_between_two_steps() -> None:
    ranks = trained("one pass")
    engine = synchronised(ranks.optimizers[0]).engine
    memory = next(iter(engine.layout.contexts.values())).memory
    with contextlib.suppress(MemoryError), memory.absorbing():
        raise MemoryError
    engine.abort()
    with pytest.raises(dgcopt.InterruptedStep, match="while memory took"):
        ranks.backward(2)


def test_a_failed_step_that_has_moved_the_optimizers_state_is_told_at_the_next_one() -> None:
    ranks, _ = refused_step(dgcopt.TopK(0.1), functools.partial(torch.optim.Adam, lr=0.01))
    errors = third(ranks)
    assert errors and all(isinstance(error, dgcopt.InterruptedStep) for error in errors), errors


class Failing(torch.optim.SGD):
    """SGD whose step fails once it has moved a parameter, and its momentum."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise MemoryError("injected")


@pytest.mark.parametrize("source", ["gradient", "update"])
def test_an_optimizer_whose_own_step_fails_is_between_two_steps(source: str) -> None:
    """Weights have moved, or the optimizer's state: neither a step nor a checkpoint goes on from there."""
    compressor = dgcopt.TopK(0.1, source=source)  # type: ignore[arg-type]
    settings = {"compression": compressor}
    ranks = Ranks(
        2, functools.partial(Failing, lr=0.1, momentum=0.9), functools.partial(small_model, torch.float32), **settings
    )
    ranks.step(0)
    saved = ranks.optimizers[0].state_dict()
    ranks.optimizers[0].fails = True
    errors = third(ranks)
    assert isinstance(errors[0], MemoryError), errors
    ranks.optimizers[0].fails = False
    with pytest.raises(dgcopt.InterruptedStep, match=r"rank 0: .* Restore all ranks from a checkpoint"):
        ranks.optimizers[0].state_dict()
    with pytest.raises(dgcopt.InterruptedStep, match=r"rank 0: .* Restore all ranks from a checkpoint"):
        ranks.backward(3)
    ranks.optimizers[0].load_state_dict(saved)
    assert ranks.optimizers[0].state_dict()["dgcopt"]["step"] == 1


def test_a_step_that_fails_before_weights_move_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged gradients are still there."""
    undisturbed, ranks = trained("one pass"), trained("one pass")
    third(undisturbed)
    begin, failed = CommitMarker.begin, []

    def failing(self: CommitMarker, what: str) -> None:
        if what == "weights" and not failed:
            failed.append(what)
            raise MemoryError("injected")
        begin(self, what)

    monkeypatch.setattr(CommitMarker, "begin", failing)
    errors = third(ranks)
    assert [type(error) for error in errors] == [MemoryError] and failed
    ranks.optimizers[0].step()
    assert all(same(kept(ranks, rank), kept(undisturbed, rank)) for rank in range(2))


def test_a_round_that_is_interrupted_while_weights_change_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [small_model(torch.float32) for _ in range(2)]
    comms = dgcopt.simulated_world(2)
    optimizers = [
        dgcopt.LocalSGD(make(model.parameters()), every=1, named_parameters=model.named_parameters(), comm=comm)
        for model, comm in zip(ranks, comms, strict=True)
    ]
    write = Bucket.write

    def failing(self: Bucket, flat: Tensor) -> None:
        write(self, flat)
        raise MemoryError("injected")

    monkeypatch.setattr(Bucket, "write", failing)
    for optimizer in optimizers:
        with contextlib.suppress(MemoryError):
            optimizer.step()
    for optimizer in optimizers:
        with pytest.raises(dgcopt.InterruptedStep, match="Restore all ranks from a checkpoint"):
            optimizer.state_dict()


def finished_of(comm: dgcopt.Comm, *results: Tensor) -> list[FinishedExchange]:
    """One finished exchange per result, each of a parameter of 3 elements in a bucket of its own."""
    named = [(f"p{place}", torch.zeros(3)) for place in range(len(results))]
    buckets = build_buckets(named, lambda *_: "matrix", 1, 1, None, GradientBucket)
    finished = []
    for bucket, result in zip(buckets, results, strict=True):
        pending = PendingExchange(bucket.label, bucket)
        pending.result = result
        context = context_of(bucket, comm, "average", Store())
        finished.append(FinishedExchange(pending, context, None, lambda _: lambda: None, bucket.numel))
    return finished


def test_of_several_exchanges_those_with_refused_messages_are_named() -> None:
    """A message may be refused by its checks alone, with results that are finite."""
    comm = dgcopt.simulated_world(2)[0]
    finished = finished_of(comm, torch.ones(64), torch.ones(64))
    assert not inspect(finished, comm)
    label, context = finished[1].pending.label, finished[1].context
    assert context is not None
    context.checks.refuse([1])
    assert inspect(finished, comm) == [NotFinite(label, [1])]
    rows = torch.tensor([[torch.nan], [1.0]])
    context.checks.check_finite(rows, by_sender=rows)
    assert inspect(finished, comm) == [NotFinite(label, [0, 1])], "the other rank's holds NaN"


def test_sparse_sums_are_inspected_always_and_gaps_of_dense_ones_never() -> None:
    """Where an allreduce has made a sum, gaps between parameters may hold anything."""
    comm = dgcopt.simulated_world(2)[0]
    nan = torch.full((64,), torch.nan)
    assert not inspect(finished_of(comm, nan.index_fill(0, torch.arange(3), 1.0)), comm, sums=True)
    assert inspect(finished_of(comm, nan), comm, sums=True) and not inspect(finished_of(comm, nan), comm)
    (sparse,) = finished_of(comm, nan[:6].view(2, 3).to_sparse(1))
    assert inspect([sparse], comm) and inspect([replace(sparse, context=None)], comm)
