"""Graphs of gossip, and SGP over them, do what an independent, naive implementation of their rules does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.averaging.gossip import SGP
from dgcopt.averaging.graphs import BipartiteExponential, Exponential, Graph, Ring, ShiftOne, edges_of, is_balanced, mix
from dgcopt.checkpoint import reshare
from dgcopt.errors import ConfigError
from tests.conformance import naive_gossip as naive
from tests.conformance.gossip import (
    ADAM,
    MOMENTUM,
    PLAIN,
    SIZES,
    STEPS,
    assert_alike,
    assert_resumes,
    assert_uneven,
    assert_warms_up,
    averaged,
    flat_numel,
    lr_at,
    sent,
    sent_in_step,
    two_buckets,
)
from tests.conformance.naive_gossip import Replicas

GRAPHS: list[tuple[Graph, Callable]] = [
    (Exponential(), naive.exponential(1)),
    (Exponential(2), naive.exponential(2)),
    (Exponential(20), naive.exponential(20)),
    (Ring(), naive.ring),
    (Ring(directed=True), naive.directed_ring),
    (ShiftOne(), naive.shift_one),
    (BipartiteExponential(), naive.bipartite),
]


@dataclass(frozen=True)
class Star(Graph):
    """A user's own, in which rank 0 hears more than it says."""

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.3 / (size - 1))


@dataclass(frozen=True)
class Detours(Graph):
    """Another one, of two rounds, which only together are connected; the second is balanced by itself."""

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        if round == 0:
            return {0: 0.25} if rank == size - 1 else {}
        return {(rank + 1) % size: 0.5}

    def period(self, size: int) -> int:
        return 2


SKEWED: list[Graph] = [Star(), Detours()]


def mixed(rows: Tensor, graph: Graph, round: int) -> Tensor:
    """One round of one row per rank."""
    places = [SimpleNamespace(rank=rank, size=len(rows)) for rank in range(len(rows))]
    exchanges = [mix(row.clone(), graph, place, round) for row, place in zip(rows, places, strict=True)]
    return torch.stack(dgcopt.simulate(exchanges))


def random_rows(size: int) -> Tensor:
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def sizes_of(graph: Graph) -> list[int]:
    return [
        size
        for size in (*SIZES, 6, 7, 9, 12)
        if not isinstance(graph, BipartiteExponential) or size in (1, 2, 4, 8, 6, 12)
    ]


each_graph = pytest.mark.parametrize(
    ("graph", "send_to"), GRAPHS, ids=lambda value: repr(value) if isinstance(value, Graph) else ""
)


def each_graph_of(*sizes: int) -> pytest.MarkDecorator:
    """Graphs and sizes that go together."""
    cases = [
        pytest.param(graph, send_to, size, id=f"{graph!r}-{size}")
        for graph, send_to in GRAPHS
        for size in sizes
        if size in sizes_of(graph)
    ]
    return pytest.mark.parametrize(("graph", "send_to", "size"), cases)


class TestGraphs:
    @each_graph
    def test_peers_are_those_of_the_rule(self, graph: Graph, send_to: Callable) -> None:
        for size in sizes_of(graph)[1:]:
            for round in range(graph.period(size)):
                for rank in range(size):
                    assert graph.shares(rank, size, round) == pytest.approx(naive.even(send_to)(rank, size, round))

    @each_graph
    def test_shares_keep_the_mean_and_bring_everyone_to_it(self, graph: Graph, send_to: Callable) -> None:
        for size in sizes_of(graph):
            assert is_balanced(graph, size)
            if size == 1:
                assert torch.equal(mixed(random_rows(1), graph, 3), random_rows(1))
                continue
            rows, whole = random_rows(size), torch.eye(size, dtype=torch.float64)
            for round in range(2 * graph.period(size)):
                p = naive.matrix(naive.even(send_to), size, round)
                assert (p >= 0).all() and (p.diagonal() > 0).all()
                torch.testing.assert_close(p.sum(0), torch.ones(size, dtype=torch.float64))
                torch.testing.assert_close(mixed(rows, graph, round), p @ rows, rtol=1e-12, atol=1e-13)
                rows, whole = p @ rows, p @ whole
            everyone = torch.full((size, size), 1 / size, dtype=torch.float64)
            torch.testing.assert_close(torch.linalg.matrix_power(whole, 1024), everyone, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize(
        ("peers", "size", "rounds"), [(1, 2, 1), (1, 8, 3), (2, 9, 2), (2, 243, 5), (3, 64, 3), (1, 1024, 10)]
    )
    def test_exponential_is_exact_after_a_logarithm_of_rounds(self, peers: int, size: int, rounds: int) -> None:
        graph = Exponential(peers)
        assert is_balanced(graph, size) and graph.period(size) == rounds
        numbers = random_rows(size)[:, 0]
        mean = numbers.mean().expand(size)
        for round in range(rounds):
            assert len(edges_of(graph, size, round).source) == peers * size
            numbers = edges_of(graph, size, round).push(numbers)
        torch.testing.assert_close(numbers, mean, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("size", [2, 4, 6, 8, 10])
    def test_pairs_of_shift_one_cross_the_halves(self, size: int) -> None:
        met: list[set[int]] = [set() for _ in range(size)]
        for s in range(size // 2):
            for rank in range(size):
                ((peer, share),) = ShiftOne().shares(rank, size, s).items()
                assert share == 0.5 and ShiftOne().shares(peer, size, s) == {rank: 0.5}
                assert (rank < size // 2) != (peer < size // 2)
                met[rank].add(peer)
        assert all(len(peers) == size // 2 for peers in met)

    @pytest.mark.parametrize("size", [1, 3, 5, 7, 9])
    def test_of_an_odd_number_everyone_meets_everyone_and_one_sits_out(self, size: int) -> None:
        met: list[set[int]] = [set() for _ in range(size)]
        out = []
        for s in range(size):
            for rank in range(size):
                peers = ShiftOne().shares(rank, size, s)
                if not peers:
                    out.append(rank)
                for peer in peers:
                    assert ShiftOne().shares(peer, size, s) == {rank: 0.5}
                    met[rank].add(peer)
        assert met == [set(range(size)) - {rank} for rank in range(size)]
        assert sorted(out) == list(range(size))

    @pytest.mark.parametrize("size", [3, 4, 8])
    def test_pairs_get_the_same_bits(self, size: int) -> None:
        rows = mixed(random_rows(size).float(), ShiftOne(), 2)
        for rank in range(size):
            for peer in ShiftOne().shares(rank, size, 2 % ShiftOne().period(size)):
                assert torch.equal(rows[rank], rows[peer])

    def test_pairs_and_equal_distances_take_one_send_and_receive(self) -> None:
        for graph in (Exponential(), ShiftOne(), BipartiteExponential(), Ring(directed=True)):
            for size in (2, 4, 6, 8, 64):
                assert {edges_of(graph, size, round).turns for round in range(graph.period(size))} == {1}
        assert edges_of(Ring(), 5, 0).turns == 2 and edges_of(Exponential(4), 25, 1).turns == 4
        assert edges_of(Star(), 8, 0).turns == 7

    @pytest.mark.parametrize("graph", SKEWED)
    @pytest.mark.parametrize("size", SIZES)
    def test_a_graph_that_is_not_balanced_does_what_its_shares_say(self, graph: Graph, size: int) -> None:
        assert is_balanced(graph, size) == (size == 1)
        rows = random_rows(size)
        for round in range(4):
            p = naive.matrix(_periodic(graph), size, round)
            torch.testing.assert_close(mixed(rows, graph, round), p @ rows, rtol=1e-12, atol=1e-13)


class TestSGP:
    @each_graph_of(*SIZES)
    def test_it_is_the_algorithm(self, graph: Graph, send_to: Callable, size: int) -> None:
        for every, make in ((1, MOMENTUM), (2, ADAM)):
            ours = averaged(SGP(graph, every=every), size, make)
            assert_alike(ours, naive.Push(Replicas(size, make), naive.even(send_to), every))

    @each_graph_of(1, 2, 3, 8)
    def test_with_overlap_the_gradient_is_of_weights_before_the_round(
        self, graph: Graph, send_to: Callable, size: int
    ) -> None:
        for every, make in ((1, two_buckets), (3, MOMENTUM)):
            ours = averaged(SGP(graph, overlap=True, every=every), size, make)
            theirs = naive.Mixed(Replicas(size, make), naive.graph(naive.even(send_to)), every, first=False)
            assert_alike(ours, theirs)

    @pytest.mark.parametrize("graph", SKEWED)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(("every", "make"), [(1, MOMENTUM), (2, two_buckets), (3, ADAM)])
    def test_push_sum_weights_of_a_graph_that_is_not_balanced(
        self, graph: Graph, size: int, every: int, make: Callable
    ) -> None:
        ours = averaged(SGP(graph, every=every), size, make)
        assert_alike(ours, naive.Push(Replicas(size, make), _periodic(graph), every))

    @pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (4, 2)])
    @pytest.mark.parametrize("graph", [Exponential(), Ring(), Star(), Detours()])
    @pytest.mark.parametrize(("every", "make"), [(1, MOMENTUM), (2, two_buckets)])
    def test_hierarchical(self, graph: Graph, nodes: int, per_node: int, every: int, make: Callable) -> None:
        ours = averaged(SGP(graph, every=every, hierarchical=True), nodes * per_node, make, nodes)
        theirs = naive.Push(Replicas(nodes * per_node, make), _periodic(graph), every, per_node)
        assert_alike(ours, theirs, steps=7)

    def test_hierarchical_with_overlap(self) -> None:
        ours = averaged(SGP(Ring(), overlap=True, hierarchical=True), 6, MOMENTUM, nodes=3)
        mix = naive.between_nodes(naive.graph(naive.even(naive.ring)), 2)
        assert_alike(ours, naive.Mixed(Replicas(6, MOMENTUM), mix, 1, first=False))

    def test_a_graph_of_machines_need_not_fit_the_ranks(self) -> None:
        averaged(SGP(BipartiteExponential(), hierarchical=True), 6, nodes=2)
        with pytest.raises(ConfigError, match="3 is an odd number of ranks"):
            averaged(SGP(BipartiteExponential(), hierarchical=True), 6, nodes=3)
        with pytest.raises(ConfigError, match=r"Star\(\) is not balanced among 3 machines"):
            averaged(SGP(Star(), overlap=True, hierarchical=True), 6, nodes=3)

    @pytest.mark.parametrize(("graph", "steps"), [(Star(), 40), (Detours(), 110), (Exponential(), 4), (ShiftOne(), 4)])
    def test_all_ranks_come_to_the_mean(self, graph: Graph, steps: int) -> None:
        size = 4
        alone = Replicas(size, PLAIN)
        alone.train(0, 0.1)
        ranks = averaged(SGP(graph), size)
        ranks.train(0, 0.1)
        assert (ranks.read() - ranks.read().mean(0)).abs().max() > 1e-3
        for t in range(1, steps):
            ranks.train(t, 0.0)
        torch.testing.assert_close(ranks.read(), naive.mean(alone.read(), 0), rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("make", [MOMENTUM, ADAM])
    @pytest.mark.parametrize("graph", [Exponential(), Star()])
    def test_one_rank_is_left_alone(self, graph: Graph, make: Callable) -> None:
        for overlap in (False, True):
            ours, theirs = averaged(SGP(graph, overlap), 1, make), Replicas(1, make)
            for t in range(STEPS):
                ours.train(t, lr_at(t))
                theirs.train(t, lr_at(t))
                assert torch.equal(ours.read(), theirs.read())
            assert sent(ours) == [0]

    @pytest.mark.parametrize(
        "rule",
        [
            SGP(),
            SGP(overlap=True),
            SGP(overlap=True, every=3),
            SGP(Star(), every=2),
            SGP(Detours()),
            SGP(Star(), hierarchical=True),
        ],
        ids=repr,
    )
    def test_saved_and_loaded_it_goes_on(self, rule: SGP) -> None:
        assert_resumes(rule, 4, nodes=2 if rule.hierarchical else 1)

    @pytest.mark.parametrize("graph", [Exponential(), Star()])
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_another_number_of_ranks_goes_on_from_the_mean(self, graph: Graph, size: int) -> None:
        before, after = averaged(SGP(graph), 4), averaged(SGP(graph), size)
        for t in range(3):
            before.train(t, lr_at(t))
        states = [{"optimizer": optimizer.state_dict()} for optimizer in before.optimizers]
        for rank, optimizer in enumerate(after.optimizers):
            optimizer.load_state_dict(reshare(states, rank, size)["optimizer"])
        after.train(3, 0.0)
        torch.testing.assert_close(after.read(), before.read().mean(0).expand_as(after.read()), rtol=1e-12, atol=1e-13)
        alone = Replicas(size, PLAIN)
        alone.write(after.read())
        alone.train(4, 0.1)
        after.train(4, 0.1)
        for t in range(5, 50):
            after.train(t, 0.0)
        torch.testing.assert_close(after.read(), naive.mean(alone.read(), 0), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("graph", [Exponential(), Star(), Detours()])
    @pytest.mark.parametrize("every", [1, 2])
    def test_ranks_without_data_go_on_gossiping(self, graph: Graph, every: int) -> None:
        shares = naive.even(naive.exponential(1)) if graph == Exponential() else _periodic(graph)
        for nodes, per_node in ((1, 1), (2, 2)):
            rule = SGP(graph, every=every, hierarchical=nodes > 1)
            assert_uneven(rule, naive.Push(Replicas(4, PLAIN), shares, every, per_node), (6, 5, 3, 6), nodes)

    @pytest.mark.parametrize("graph", [Star(), Detours()])
    def test_after_a_warm_up(self, graph: Graph) -> None:
        assert_warms_up(SGP(graph, warmup_steps=2), 3, lambda ranks: naive.Push(ranks, _periodic(graph), 1))

    def test_bytes(self) -> None:
        for graph, by_rank in (
            (Exponential(), [1] * 4),
            (Exponential(2), [2, 2, 2, 2]),
            (Ring(), [2] * 4),
            (ShiftOne(), [1] * 4),
            (Star(), [3, 1, 1, 1]),
        ):
            for every in (1, 2):
                ranks = averaged(SGP(graph, every=every), 4)
                weights = 8 * flat_numel(ranks.models[0])
                ranks.train(0, lr_at(0))
                for t in range(1, 5):
                    peers = [1] * 4 if graph == Exponential(2) and ((t + 1) // every) % 2 == 0 else by_rank
                    due = (t + 1) % every == 0
                    assert sent_in_step(ranks, t) == [weights * p * due for p in peers], (graph, t)

    def test_a_step_that_fails_leaves_weights_that_can_be_used(self) -> None:
        ranks = averaged(SGP(Star()), 3)
        for t in range(3):
            ranks.train(t, lr_at(t))
        before = ranks.read()
        ranks.backward(3)
        with pytest.raises(RuntimeError, match="no step today"):
            ranks.optimizers[0].step(_failing)
        assert torch.equal(ranks.read(), before)

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: SGP("ring"), "graph must be a Graph.*not 'ring'"),
            (lambda: SGP(every=0), "every.*not 0"),
            (lambda: SGP(warmup_steps=-1), "warmup_steps.*not -1"),
            (lambda: Exponential(0), "peers.*not 0"),
            (lambda: Exponential(1.0), "peers.*not 1.0"),
        ],
    )
    def test_bad_settings(self, make: Callable, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            make()

    def test_graphs_that_do_not_fit_the_number_of_ranks_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"3 is an odd number of ranks\. Use Exponential or ShiftOne"):
            averaged(SGP(BipartiteExponential()), 3)
        with pytest.raises(ConfigError, match=r"Star\(\) is not balanced among 2 ranks.*overlap=False"):
            averaged(SGP(Star(), overlap=True), 2)

    @pytest.mark.parametrize(
        ("shares", "reason"),
        [
            (lambda rank, size, round: {rank: 0.5}, r"round 0 rank 0 of 3 sends to itself"),
            (lambda rank, size, round: {3: 0.5} if rank == 2 else {}, "rank 2 of 3 sends to 3, which is not a rank"),
            (lambda rank, size, round: {-1: 0.5}, "rank 0 of 3 sends to -1, which is not a rank"),
            (lambda rank, size, round: {"1": 0.5}, "sends to '1'"),
            (lambda rank, size, round: {(rank + 1) % 3: -0.1}, "rank 0 of 3 sends a share of -0.1 to rank 1"),
            (lambda rank, size, round: {(rank + 1) % 3: float("nan")}, "sends a share of nan"),
            (lambda rank, size, round: {(rank + 1) % 3: "half"}, "sends a share of 'half'"),
            (lambda rank, size, round: {(rank + 1) % 3: 1}, "sends shares that add up to 1. Make the sum less than 1"),
            (lambda rank, size, round: {(rank + i) % 3: 0.5 for i in (1, 2)}, "shares that add up to 1"),
            (lambda rank, size, round: {}, r"rank\(s\) 1, 2 never hear of rank 0"),
            (lambda rank, size, round: {0: 0.5} if rank else {}, r"rank\(s\) 1, 2 never hear of rank 0"),
            (
                lambda rank, size, round: {} if rank else {1: 0.3, 2: 0.3},
                r"rank\(s\) 1, 2 are never heard of by rank 0",
            ),
            (lambda rank, size, round: {1 - rank: 0.5} if rank < 2 else {}, r"rank\(s\) 2 never hear of rank 0"),
        ],
    )
    def test_shares_that_cannot_be(self, shares: Callable, reason: str) -> None:
        class Odd(Graph):
            def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
                return shares(rank, size, round)

        with pytest.raises(ConfigError, match=reason) as caught:
            averaged(SGP(Odd()), 3)
        assert "Odd" in str(caught.value)

    def test_a_graph_that_changes_or_has_no_period(self) -> None:
        @dataclass
        class Loose(Graph):
            def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
                return {}

        class Endless(Loose):
            __hash__ = object.__hash__

            def period(self, size: int) -> int:
                return 0

        with pytest.raises(ConfigError, match="Make it a frozen dataclass"):
            averaged(SGP(Loose()), 2)
        with pytest.raises(ConfigError, match=r"the period of .* whole number of at least 1, not 0"):
            averaged(SGP(Endless()), 2)


def _periodic(graph: Graph) -> Callable[[int, int, int], dict[int, float]]:
    return lambda rank, size, round: {} if size == 1 else graph.shares(rank, size, round % graph.period(size))


def _failing() -> Tensor:
    raise RuntimeError("no step today")
