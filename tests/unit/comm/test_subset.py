"""Comms of some of the ranks, on the simulated wire; the other wires are in tests/distributed."""

from types import SimpleNamespace

import pytest
import torch

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, Broadcast
from dgcopt.comm import LocalComm
from dgcopt.errors import CommError, ConfigError


def test_two_subsets_and_a_rank_outside():
    """Both halves compute at the same time, each on its own ranks; the last rank is alone."""
    comms = dgcopt.simulated_world(5, checksums=True)
    for sets in (((0, 3), (2, 1)), ([3, 0], SimpleNamespace(ranks=[1, 2]))):
        made = [[comm.among(ranks) for ranks in sets] for comm in comms]
        first = {rank: made[rank][0] for rank in (0, 3)}
        second = {rank: made[rank][1] for rank in (1, 2)}
        for subset in (first, second):
            assert [(c.rank, c.size) for c in subset.values()] == [(0, 2), (1, 2)]
            assert {type(c) for c in subset.values()} == {type(comms[0])} and all(c.checksums for c in subset.values())
        assert all(isinstance(c, LocalComm) for c in (*made[4], made[0][1], made[2][0]))
        mine = {**first, **second, 4: made[4][0]}
        order = (0, 1, 4, 2, 3)
        started = {
            rank: [
                mine[rank].start(AllReduce(torch.tensor([10.0 * rank]), op="sum")),
                mine[rank].start(AllGather(torch.tensor([rank]), group="control")),
            ]
            for rank in order
        }
        results = {rank: [mine[rank].wait(handle).flatten().tolist() for handle in started[rank]] for rank in order}
        assert results == {
            0: [[30], [0, 3]], 3: [[30], [0, 3]], 1: [[30], [1, 2]], 2: [[30], [1, 2]], 4: [[40], [4]]
        }  # fmt: skip


def test_a_subset_keeps_its_machines_and_its_parent():
    comms = dgcopt.simulated_world(6, nodes=3)
    subset = [comms[rank].among([1, 2, 3]) for rank in (1, 2, 3)]
    assert [(c.node, c.nodes, c.ranks("node")) for c in subset] == [(0, 2, (0,)), (1, 2, (1, 2)), (1, 2, (1, 2))]
    pair = [comm.among([1, 2]) for comm in subset]  # ranks of the subset
    assert isinstance(pair[0], LocalComm) and [c.rank for c in pair[1:]] == [0, 1]
    handles = [c.start(Broadcast(torch.tensor([c.rank]), root=1)) for c in pair[1:]]
    assert [int(c.wait(h)) for c, h in zip(pair[1:], handles, strict=True)] == [1, 1]
    for comm in (*subset, *pair):
        comm.close()
    handles = [comm.start(AllReduce(torch.ones(1), op="sum")) for comm in comms]
    assert [float(c.wait(h)) for c, h in zip(comms, handles, strict=True)] == [6] * 6


def test_a_closed_subset_is_told_and_made_anew():
    comms = dgcopt.simulated_world(3)
    first = [comm.among([0, 2]) for comm in comms]
    for comm in first[::2]:
        comm.close()
        with pytest.raises(CommError, match=r"^rank \d: AllReduce.*: this wire is closed. Join by dgcopt.init"):
            comm.start(AllReduce(torch.ones(1), op="sum"))
    second = [comm.among([0, 2]) for comm in comms]
    assert second[0] is not first[0] and second[1].run(AllReduce(torch.ones(1))) == 1
    handles = [comm.start(AllReduce(torch.ones(1), op="sum")) for comm in second[::2]]
    assert [float(comm.wait(handle)) for comm, handle in zip(second[::2], handles, strict=True)] == [2, 2]


def test_the_ranks_of_a_machine_and_those_across():
    comms = dgcopt.simulated_world(6, nodes=2, checksums=True)
    parts = {name: [comm.among(name) for comm in comms] for name in ("node", "across")}
    assert [(c.rank, c.size, c.nodes) for c in parts["node"]] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)] * 2
    assert [(c.rank, c.size, c.nodes) for c in parts["across"]] == [(0, 2, 2)] * 3 + [(1, 2, 2)] * 3
    for made, sums in ((parts["node"], [3, 3, 3, 12, 12, 12]), (parts["across"], [3, 5, 7, 3, 5, 7])):
        handles = [c.start(AllReduce(torch.tensor([float(r)]), op="sum")) for r, c in enumerate(made)]
        assert [float(c.wait(handle)) for c, handle in zip(made, handles, strict=True)] == sums
        assert all(c.checksums for c in made)


def test_across_machines_of_several_sizes_are_those_that_have_the_local_rank():
    comms = [comm.among([1, 2, 3, 4, 5]) for comm in dgcopt.simulated_world(6, nodes=2)[1:]]  # 2 ranks, and 3
    assert [(c.rank, c.size) for c in (comm.among("node") for comm in comms)] == [
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    across = [comm.among("across") for comm in comms]
    assert [(c.rank, c.size) for c in across] == [(0, 2), (0, 2), (1, 2), (1, 2), (0, 1)]
    assert isinstance(across[4], LocalComm)


def test_optimizers_of_machines_average_on_each():
    """And in a checkpoint, rank and size are those of the set."""
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(4)]
    optimizers = []
    for model, comm in zip(models, dgcopt.simulated_world(4, nodes=2), strict=True):
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizers.append(dgcopt.DistributedOptimizer(optimizer, process_set="node", comm=comm))
    for rank, model in enumerate(models):
        model(torch.full((1, 2), float(rank))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [model.weight[0, 0].item() for model in models] == [-0.5, -0.5, -2.5, -2.5]
    kept = [optimizer.state_dict()["dgcopt"] for optimizer in optimizers]
    assert [(state["rank"], state["world_size"]) for state in kept] == [(0, 2), (1, 2)] * 2


def test_two_optimizers_on_two_subsets_equal_two_worlds_of_their_own():
    """Each half trains by itself, and a rank outside trains alone."""

    def train(comms):
        optimizers, models = [], []
        for place, comm in enumerate(comms):
            torch.manual_seed(place // 2)
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizers.append(
                dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC(0.5), comm=comm)
            )
            models.append(model)
        for step in range(3):
            for place, model in enumerate(models):
                model(torch.full((1, 3), 1.0 + place + step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [model.weight.detach() for model in models]

    world = dgcopt.simulated_world(5)
    sets = [(0, 1), (2, 3)]
    ours = train([*(world[r].among(members) for members in sets for r in members), world[4].among(sets[0])])
    theirs = train([*dgcopt.simulated_world(2), *dgcopt.simulated_world(2), LocalComm()])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[0], ours[1]) and not torch.equal(ours[1], ours[2])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "one or more of the ranks 0 to 2"),
        ([0, 3], r"0 to 2, each once, not \[0, 3\]"),
        ([-1], "0 to 2"),
        ([1, 1], "each once"),
        ([0.5], "whole numbers"),
        ("machine", "whole numbers, 'node' or 'across', not 'machine'"),
        (SimpleNamespace(ranks=None), "whole numbers, not None"),
    ],
)
def test_ranks_that_cannot_be_a_subset(ranks, words):
    for comm in dgcopt.simulated_world(3):
        with pytest.raises(ConfigError, match=words):
            comm.among(ranks)


def test_alone_there_is_one_subset():
    comm = LocalComm(deadline=7)
    assert (comm.among([0]).size, comm.among([0]).deadline) == (1, 7)
    assert all(isinstance(comm.among(name), LocalComm) for name in ("node", "across"))
    assert all(isinstance(comm.among([1]), LocalComm) for comm in dgcopt.simulated_world(2))
    with pytest.raises(ConfigError, match="0 to 0"):
        comm.among([1])
