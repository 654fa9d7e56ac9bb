"""Exchanges in flight: what they may return, and what their collectives are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllReduce, Collective
from dgcopt.comm import Handle
from dgcopt.compressors import GradientExchange
from dgcopt.exchange.scheduler import CollectiveScheduler, PendingExchange
from dgcopt.exchange.telemetry import Telemetry
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks


class Returning(dgcopt.Compressor):
    """Of two buckets, the second one's exchange returns what `spoil` makes of the mean; the first goes through."""

    def __init__(self, spoil: Callable[[Tensor], Any]) -> None:
        self._spoil = spoil

    def exchange(self, grad: Tensor, ctx: dgcopt.Context) -> Any:
        held = ctx.memory.remember("residual", grad)
        held += 1
        mean = yield AllReduce(grad)
        return self._spoil(mean) if ctx.index == 1 else mean


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(lambda mean: None, "NoneType"), (lambda mean: mean[1:], r"shape \(\d+,\)"), (lambda mean: [mean], "list")],
)
def test_a_compressor_that_returns_no_averaged_gradient_is_named_and_no_bucket_is_settled(
    spoil: Callable[[Tensor], Any], what: str
) -> None:
    sizes = {"bucket_mb": 1e-3, "first_bucket_mb": 1e-3}
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), compression=Returning(spoil), **sizes)
    before = ranks.weights()
    message = rf"Returning\.exchange must return the averaged gradient of bucket 1 .* or a SparseSum, not {what}"
    with pytest.raises(dgcopt.ConfigError, match=message):
        ranks.step()
    assert all(torch.equal(one, other) for one, other in zip(ranks.weights(), before, strict=True))
    held = synchronised(ranks.optimizers[0]).engine.store.memory()["residual"]
    assert len(held) == 6 and not any(residual.any() for residual in held.values())


def test_ranks_with_fewer_rounds_use_the_same_labels() -> None:
    """The simulated wire refuses collectives whose labels differ over ranks, and first ranks of machines have more."""
    compressor = dgcopt.Hierarchical(dgcopt.DGC(0.1))
    ranks = Ranks(4, lambda params: torch.optim.SGD(params, lr=0.1), nodes=2, compression=compressor)
    started: dict[int, list[str]] = {0: [], 1: []}
    for rank, labels in started.items():
        comm = ranks.comms[rank]
        comm.start = noting(comm.start, labels)  # type: ignore[method-assign]
    for seed in range(2):
        for labels in started.values():
            labels.clear()
        ranks.step(seed)
    ranks.assert_replicas_equal()
    assert len({*started[0]}) == len(started[0]) > len(started[1]) > 0, "no label comes twice in a step"


def noting(start: Callable[[Collective], Handle], labels: list[str]) -> Callable[[Collective], Handle]:
    def noted(collective: Collective) -> Handle:
        labels.append(f"{collective.group}: {collective.label}")
        return start(collective)

    return noted


class ThreeRounds(dgcopt.Compressor):
    def __init__(self, in_turn: bool) -> None:
        self.in_turn = in_turn

    def exchange(self, grad: Tensor, ctx: dgcopt.Context) -> Any:
        for _ in range(3):
            grad = yield AllReduce(grad)
        return grad


@pytest.mark.parametrize(("in_turn", "expected"), [(False, "00 10 01 11 02 12"), (True, "00 01 02 10 11 12")])
def test_buckets_go_round_by_round_or_each_to_its_end(in_turn: bool, expected: str) -> None:
    sizes = {"bucket_mb": 1e-3, "first_bucket_mb": 1e-3}
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), compression=ThreeRounds(in_turn), **sizes)
    labels: list[str] = []
    ranks.comms[0].start = noting(ranks.comms[0].start, labels)  # type: ignore[method-assign]
    ranks.step()
    found = re.findall(r"world: .*bucket (\d).*round (\d)", "\n".join(labels))
    assert " ".join(map("".join, found)) == expected


@pytest.mark.parametrize(("overlap", "expected"), [(False, 3), (True, 5)])
def test_messages_that_leave_after_the_vote_travel_together(overlap: bool, expected: int) -> None:
    """Those of vectors and of matrices, to owners and from them; apart where each leaves once it is ready."""
    compressor = dgcopt.DGC.compact(0.1, warmup=None, reduce="owner", overlap=overlap)
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), compression=compressor)
    scheduler = synchronised(ranks.optimizers[0]).engine.runner.scheduler
    started: list[str] = []
    start = scheduler.start
    scheduler.start = lambda collective, label: started.append(label) or start(collective, label)  # type: ignore
    for seed in range(3):
        started.clear()
        ranks.step(seed)
    assert len(started) == expected, started
    ranks.assert_replicas_equal()


def test_only_a_vote_that_fails_advises_on_ranks_that_run_out_of_data() -> None:
    comm = dgcopt.simulated_world(2)[0]
    scheduler = CollectiveScheduler(comm, Telemetry(), "optimizer")

    def gone(_: Handle) -> Tensor:
        raise dgcopt.CommError("gone.")

    comm.wait = gone  # type: ignore[method-assign]
    for label, advises in (("vote", True), ("bucket 0 round 0", False)):
        with pytest.raises(dgcopt.CommError, match=r"gone\.") as caught:
            scheduler.wait(scheduler.start(AllReduce(torch.zeros(1)), label))
        assert ("dgcopt.join" in str(caught.value)) == advises


def test_cancelled_exchanges_wait_for_their_collectives_and_are_as_before_their_launch() -> None:
    scheduler = CollectiveScheduler(dgcopt.simulated_world(2)[0], Telemetry(), "test")
    exchanges = [PendingExchange(f"bucket {number}", number) for number in range(2)]
    for pending in exchanges:
        scheduler.launch(pending, one_round())
    started = [pending.handle for pending in exchanges]
    assert [*scheduler.cancel(exchanges)] == started and None not in started
    assert repr(exchanges) == repr([PendingExchange(f"bucket {number}", number) for number in range(2)])


def one_round() -> GradientExchange:
    return (yield AllReduce(torch.zeros(1)))
