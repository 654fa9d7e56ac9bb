"""Costs of collectives: exact on paper, fitted to measurements, and never less for more bytes or ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcopt import ConfigError
from dgcopt.tuning.probe import load_probe, save_probe
from dgcopt.tuning.wire import HALF, KINDS, Fitted, Network, fit

LATENCY, BANDWIDTH, MEGA = 1e-3, 1e8, 1e6

kinds = st.sampled_from(KINDS)
sizes = st.integers(2, 300)
messages = st.floats(1, 1e10)


@pytest.mark.parametrize(
    ("kind", "latency", "transfer"),
    [
        ("AllReduce", 6 * LATENCY, 1.5 * MEGA / BANDWIDTH),
        ("AllGather", 3 * LATENCY, 3 * MEGA / BANDWIDTH),
        ("ReduceScatter", LATENCY, 0.75 * MEGA / BANDWIDTH),
        ("AllToAll", LATENCY, 0.75 * MEGA / BANDWIDTH),
        ("Broadcast", 2 * LATENCY, 2 * MEGA / BANDWIDTH),
        ("SendRecv", LATENCY, MEGA / BANDWIDTH),
    ],
)
def test_among_four_ranks_on_paper(kind: str, latency: float, transfer: float) -> None:
    cost = Network(LATENCY, BANDWIDTH).cost(kind, MEGA, 4)
    assert cost.latency == pytest.approx(latency)
    assert cost.transfer == pytest.approx(transfer)


def test_a_small_allgather_goes_to_all_ranks_at_once() -> None:
    assert Network(LATENCY, BANDWIDTH).cost("AllGather", 1000, 4).latency == LATENCY


def test_a_tree_has_fewer_hops_and_is_taken_only_where_it_is_faster() -> None:
    ring, tree = Network(LATENCY, BANDWIDTH), Network(LATENCY, BANDWIDTH, algorithm="tree")
    assert tree.cost("AllReduce", 1000, 256).latency == pytest.approx(16 * LATENCY)
    assert ring.cost("AllReduce", 1000, 256).latency == pytest.approx(510 * LATENCY)
    assert tree.cost("AllReduce", 1e12, 256) == ring.cost("AllReduce", 1e12, 256)


def test_ranks_of_a_machine_use_its_bus_and_share_its_link() -> None:
    network = Network(LATENCY, BANDWIDTH, local_size=4, node_latency=1e-6, node_bandwidth=1e10)
    assert network.cost("AllReduce", MEGA, 4, "node").transfer == pytest.approx(1.5 * MEGA / 1e10)
    alone = Network(LATENCY, BANDWIDTH).cost("AllReduce", MEGA, 2)
    assert network.cost("AllReduce", MEGA, 2, "across") == alone, "one rank of each machine"
    assert network.cost("AllReduce", MEGA, 4).transfer < network.cost("AllReduce", MEGA, 8).transfer / 50
    assert network.cost("AllReduce", MEGA, 8).transfer == pytest.approx(1.75 * MEGA / BANDWIDTH), (
        "a ring leaves it once"
    )
    assert network.cost("AllToAll", MEGA, 8).transfer == pytest.approx(4 * 4 * MEGA / 8 / BANDWIDTH)
    assert network.cost("AllGather", 1000, 8).transfer == pytest.approx(4 * 4 * 1000 / BANDWIDTH)


@given(kinds, messages, sizes, st.sampled_from(["ring", "tree"]), st.floats(1, 4))
def test_more_bytes_more_ranks_and_slower_links_cost_no_less(
    kind: str, nbytes: float, size: int, algorithm: str, more: float
) -> None:
    def seconds(nbytes: float, size: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> float:
        return Network(latency, bandwidth, algorithm=algorithm).cost(kind, nbytes, size).seconds  # type: ignore[arg-type]

    base = seconds(nbytes, size) * (1 - 1e-9)
    assert seconds(nbytes * more, size) >= base
    assert seconds(nbytes, size + 1) >= base
    assert seconds(nbytes, size, latency=LATENCY * more) >= base
    assert seconds(nbytes, size, bandwidth=BANDWIDTH / more) >= base


@given(st.floats(0, 1), st.floats(1e-12, 1e-3), st.lists(st.integers(1, 10**8), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_the_line_that_measurements_lie_on(alpha: float, beta: float, nbytes: list[int]) -> None:
    found = fit(nbytes, [alpha + beta * each for each in nbytes], 4)
    for each in (*nbytes, 2 * max(nbytes)):
        assert found.alpha + found.beta * each == pytest.approx(alpha + beta * each, rel=1e-3)


def test_neither_number_of_a_fit_is_negative() -> None:
    assert fit([1000, 2000], [1e-3, 3e-3], 2).alpha == 0
    falling = fit([1000, 2000], [3e-3, 1e-3], 2)
    assert falling.beta == 0 and falling.alpha == pytest.approx(1.2e-3)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """One of 10 ms beside one of 10 s: an ordinary least-squares fit would leave it out by its whole size."""
    found = fit([1e3, 1e6, 1e7], [0.010, 0.9, 10.0], 4)
    assert found.alpha + found.beta * 1e3 == pytest.approx(0.010, rel=0.1)


def test_measured_sizes_are_interpolated_and_larger_ones_extrapolated() -> None:
    found = fit([1000, 3000, 5000], [1.0, 4.0, 5.0], 4)
    assert found.cost(2000).seconds == pytest.approx(2.5)
    assert found.cost(10).seconds == pytest.approx(1.0)
    assert found.cost(7000).seconds == pytest.approx(5.0 + 2000 * (5.0 - 1.0) / 4000)


def test_among_other_ranks_latency_grows_with_hops_and_transfer_with_bytes() -> None:
    nbytes = [1e7, 2e7]
    network = Network(LATENCY, BANDWIDTH)
    for kind in KINDS:
        line = fit(nbytes, [network.cost(kind, each, 4).seconds for each in nbytes], 4)
        predicted = Fitted({(kind, "world"): line}).cost(kind, 2e7, 64)
        assert predicted.seconds == pytest.approx(network.cost(kind, 2e7, 64).seconds, rel=0.02), kind


def test_a_group_that_was_not_measured_is_taken_for_the_world_and_a_kind_is_an_error() -> None:
    line = fit([1000, 2000], [1.0, 2.0], 4)
    wire = Fitted({("AllReduce", "world"): line})
    assert wire.cost("AllReduce", 2000, 4, "node").seconds == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="no measurement of AllGather in group 'world': `dgcopt probe`"):
        wire.cost("AllGather", 2000, 4)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "words"),
    [([1000], [1.0], "two or more sizes"), ([5, 5], [1.0, 1.0], "two or more"), ([1, 2], [0.0, 1.0], "positive")],
)
def test_no_fit_of_too_little(nbytes: list[int], seconds: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(nbytes, seconds, 2)


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    wire = Fitted({("AllReduce", "world"): fit([1000, 2000], [1.0, 1.5], 4)})
    save_probe(wire, tmp_path / "link.json")
    assert load_probe(tmp_path / "link.json") == wire
    with pytest.raises(ConfigError, match=r"cannot read .*absent.json"):
        load_probe(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"fits": [{"kind": "AllReduce"}]}')
    with pytest.raises(ConfigError, match="is no output of `dgcopt probe --json`"):
        load_probe(tmp_path / "other.json")


def test_an_allreduce_of_16_bit_numbers_is_an_allreduce_on_paper_and_has_a_fit_of_its_own() -> None:
    link = Network(0.01, 1e6)
    assert link.cost(HALF, 1e6, 4) == link.cost("AllReduce", 1e6, 4)
    assert link.cost(HALF, 1e6, 4).seconds == pytest.approx(6 * 0.01 + 1.5)
    tree = Network(0.01, 1e9, algorithm="tree")
    assert tree.cost(HALF, 10, 64) == tree.cost("AllReduce", 10, 64)
    fits = {(kind, "world"): fit([1000, 2000], [seconds, 2 * seconds], 4) for kind, seconds in
            (("AllReduce", 1.0), (HALF, 3.0))}  # fmt: skip
    assert Fitted(fits).cost(HALF, 1000, 4).seconds == pytest.approx(3.0)


def test_messages_beyond_the_measured_ones_reach_the_rate_of_the_link() -> None:
    slow = fit([1000, 2000], [1.0, 2.0], 2)
    link, bus = fit([1000, 1_000_000], [0.01, 1.0], 2), fit([1000, 1_000_000], [1e-6, 1e-3], 2)
    fits = {("AllReduce", "world"): slow, ("AllToAll", "world"): slow, ("SendRecv", "world"): link}
    wire = Fitted(fits)
    assert wire.fastest("world") == pytest.approx(1e6)
    assert wire.cost("AllReduce", 1_002_000, 2).seconds == pytest.approx(2.0 + 1.0)
    assert wire.cost("AllReduce", 1500, 2).seconds == pytest.approx(1.5)
    assert wire.cost("AllToAll", 1_002_000, 2).seconds == pytest.approx(2.0 + 1000.0)
    assert wire.cost("SendRecv", 2_000_000, 2).seconds == pytest.approx(1.0 + 0.99 / 999_000 * 1_000_000)
    square = Fitted({("AllReduce", "across"): slow, ("SendRecv", "across"): link, ("AllReduce", "node"): bus})
    assert square.cost("AllReduce", 1_002_000, 2, "across").seconds == pytest.approx(2.0 + 1.0), "not at a bus's rate"
