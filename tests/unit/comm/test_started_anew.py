"""What happens above a library that was started anew, as `hvd.elastic.run` does with Horovod when a worker is lost."""

from __future__ import annotations

import logging
import os
import types

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import Comm, CommError, ConfigError, LocalSGD
from dgcopt.collectives import AllReduce
from dgcopt.comm import SimulatedComm
from dgcopt.comm.horovod import HorovodComm
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import small_batch, small_model


class Rank:
    """One rank's training over a wire that can be started anew."""

    def __init__(self, comm: SimulatedComm, **settings) -> None:
        torch.manual_seed(0)
        self.model = small_model()
        sgd = torch.optim.SGD(self.model.parameters(), 0.1, 0.9)
        self.optimizer = dgcopt.DistributedOptimizer(
            sgd, self.model.named_parameters(), dgcopt.DGC(0.1), comm=comm, **settings
        )

    def backward(self, seed: int) -> None:
        inputs, targets = small_batch(seed=seed)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()

    def is_left(self, comm: SimulatedComm, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ranks that it knew are gone, and this is its comm among those that there are now."""
        synchronised(self.optimizer).comm.is_void = lambda: True
        monkeypatch.setattr("dgcopt.gradients.synchronised.current_comm", lambda *_: comm)

    def held(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state_dict()["dgcopt"]["memory"]["residual"]


def train(ranks: list[Rank], steps: range) -> None:
    for step in steps:
        for place, rank in enumerate(ranks):
            rank.backward(10 * step + place)
        for rank in ranks:
            rank.optimizer.step()


def test_optimizers_rejoin_and_keep_what_they_hold_back(monkeypatch, caplog):
    ranks = [Rank(comm) for comm in dgcopt.simulated_world(3)]
    train(ranks, range(3))
    del ranks[1]
    committed = [rank.optimizer.state_dict() for rank in ranks]
    ranks[1].backward(7)  # one is in the middle of a step when the other one's wire fails
    for rank, comm, state in zip(ranks, dgcopt.simulated_world(2), committed, strict=True):
        rank.is_left(comm, monkeypatch)
        with caplog.at_level(logging.WARNING, "dgcopt"):
            held = rank.held()
        assert (
            synchronised(rank.optimizer).comm is comm
            and "is rank" in caplog.messages[-1]
            and "of 2" in caplog.messages[-1]
        )
        before = state["dgcopt"]["memory"]["residual"]
        assert all(torch.equal(held[name], before[name]) for name in before) and held.keys() == before.keys()
    assert [text.split("it was ")[1][:11] for text in caplog.messages] == ["rank 0 of 3", "rank 2 of 3"]
    train(ranks, range(3, 5))
    for rank, state in zip(ranks, committed, strict=True):  # lost again before there was another commit
        rank.optimizer.load_state_dict(state)
        before = state["dgcopt"]["memory"]["residual"]
        assert all(torch.equal(tensor, before[name]) for name, tensor in rank.held().items())
    train(ranks, range(3, 5))


def test_optimizers_that_cannot_rejoin_end_the_retries(monkeypatch):
    """An error that is no HorovodInternalError, and says what to use."""
    exceptions = pytest.importorskip("horovod.common.exceptions")
    in_pairs = [Rank(comm, process_set="node") for comm in dgcopt.simulated_world(4, nodes=2)]
    averaged = [Rank(comm, process_set="node") for comm in dgcopt.simulated_world(2, nodes=1)]
    for rank, comm in zip(averaged, dgcopt.simulated_world(2), strict=True):
        LocalSGD(rank.optimizer, 2, named_parameters=rank.model.named_parameters(), comm=comm)
    for rank, words in ((in_pairs[0], "among a subset of the ranks"), (averaged[0], "averages weights too")):
        rank.is_left(dgcopt.simulated_world(2)[0], monkeypatch)
        for what in (rank.optimizer.state_dict, lambda rank=rank: rank.backward(0)):
            with pytest.raises(ConfigError, match=rf"{words}.*dgcopt\.elastic\.State") as caught:
                what()
            assert not isinstance(caught.value, exceptions.HorovodInternalError)


@pytest.mark.parametrize("anew", [{"size": lambda: 2}, {"rank": lambda: 1}, {"poll": None}])
def test_a_comm_of_horovods_former_life_sends_nothing(anew, monkeypatch):
    """Other ranks, or the handles of before are unknown."""
    from dgcopt.comm.horovod import HorovodComm, _Session

    def unknown(handle):
        raise ValueError(f"Handle {handle} was not created or has been cleared.")

    hvd = types.SimpleNamespace(
        rank=lambda: 0, size=lambda: 3, is_initialized=lambda: True, poll=lambda handle: True,
        allreduce_async=lambda tensor, name, op: 5, Sum=1,
    )  # fmt: skip
    comm = object.__new__(HorovodComm)
    comm.rank, comm.size, comm._hvd, comm._session, comm._ranks = 0, 3, hvd, _Session(hvd), {"world": (0, 1, 2)}
    monkeypatch.setattr(HorovodComm, "_latest", comm._session)
    comm._session.leave_mark()
    assert not comm.is_void()
    hvd.__dict__.update(anew if "poll" not in anew else {"poll": unknown})
    assert comm.is_void()
    with pytest.raises(ConfigError, match=r"restarted, and AllReduce.* former 3 ranks\..*dgcopt\.elastic\.State"):
        comm.start(AllReduce(torch.ones(1)))
    hvd.is_initialized = lambda: False
    assert not comm.is_void(), "there is nothing that could be joined"


@pytest.mark.parametrize(("elastic", "seconds"), [({}, "65"), ({"HOROVOD_ELASTIC": "1"}, None)])
def test_gloos_own_deadline_under_horovod_is_later_than_dgcopts(elastic, seconds, monkeypatch: pytest.MonkeyPatch):
    """As it counts from the moment at which a rank stands still, and its error names no rank."""

    def init():
        raise RuntimeError("no launcher")

    horovod = types.SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr("dgcopt.comm.horovod.horovod_torch", lambda: horovod)
    monkeypatch.setattr(os, "environ", dict(elastic))
    with pytest.raises(dgcopt.CommError, match="could not start: no launcher"):
        HorovodComm(deadline=60)
    assert os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds


@pytest.mark.parametrize("silent", [0.0, 64.5])
@pytest.mark.parametrize("starts", [True, False])
def test_a_timeout_of_gloo_names_the_ranks_that_were_waited_for(
    starts: bool, silent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's error says that it was shut down, whether a rank has ended or stood still for too long."""
    comm = HorovodComm.__new__(HorovodComm)
    Comm.__init__(comm, 0, 2, 60.0)
    comm._patience, comm._heard = 65.0, 100.0 - silent
    monkeypatch.setattr("dgcopt.comm.horovod.time", types.SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(comm, "_error", lambda kind, message: kind(message))
    collective = AllReduce(torch.zeros(3), label="bucket 0")

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("Horovod has been shut down.")

    monkeypatch.setattr(comm, "_start", broken)
    handle = types.SimpleNamespace(collective=collective, done=lambda: True, result=broken)
    with pytest.raises(CommError, match="Horovod has been shut down") as failed:
        if starts:
            comm.start(collective)
        else:
            comm.wait(handle)
    assert isinstance(failed.value, dgcopt.TimeoutExceeded) == bool(silent)
    words = "rank 0 waited 64.5 s for AllReduce[3 float32] of bucket 0 over horovod, which also needs rank(s) 1."
    assert str(failed.value).startswith(words) == bool(silent)
