"""Timelines that can be worked out by hand, and properties that hold for all of them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dgcopt import ConfigError
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.tuning.timeline import Bucket, Method, Parameter, Round, break_even, fill_buckets, timeline
from dgcopt.tuning.wire import Network

MEGA = 1e6
QUIET = Network(0.0, 1e6)
"""A megabyte crosses it in a second, at once."""

DDP = Method("ddp", ((Round("AllReduce", 4 * MEGA),),), 0.0, (0.0,), overlap=True, votes=0, joins=False)
EQUAL = [Bucket(1, 2.0), Bucket(1, 3.0), Bucket(2, 4.0)]


def test_without_overlap_parts_add_up() -> None:
    """Backward, a vote of one hop, encoding, an allgather of a megabyte from three others, decoding, the optimizer."""
    method = Method("some", ((Round("AllGather", MEGA),),), encode=2.0, decode=(3.0,))
    found = timeline([Bucket(10, 5.0)], method, Network(0.01, 1e6), 4, 5.0, after=1.0)
    vote = 0.01 + 3 * 44 / 1e6
    assert found.seconds == pytest.approx(5 + vote + 2 + 3 * 0.01 + 3 + 3 + 1)
    assert found.exposed == pytest.approx(found.seconds - 5)
    assert found.sent == pytest.approx(3 * MEGA)
    assert [span.name for span in found.spans if span.row == "compute"] == [
        "backward", "encode bucket 0", "decode bucket 0", "optimizer"
    ]  # fmt: skip


def test_overlap_hides_what_fits_behind_backward() -> None:
    """Two ranks send 4 MB in 4 s: a quarter from 2 s on, one from 3 s on, and half from 4 s on, when backward ends."""
    assert timeline(EQUAL, DDP, QUIET, 2, 4.0).seconds == pytest.approx(6.0)
    faster = timeline(EQUAL, DDP, Network(0.0, 4e6), 2, 4.0)
    assert faster.seconds == pytest.approx(4.5)
    late = timeline(EQUAL, replace(DDP, overlap=False), QUIET, 2, 4.0)
    assert late.seconds == pytest.approx(8.0)


def test_encoding_during_backward_delays_it() -> None:
    method = replace(DDP, encode=4.0)
    found = timeline(EQUAL, method, Network(0.0, 1e12), 2, 4.0)
    assert found.seconds == pytest.approx(8.0)


def test_the_second_round_of_a_bucket_runs_beside_the_decoding_of_another() -> None:
    method = Method("two rounds", ((Round("AllReduce", 4 * MEGA),), (Round("AllReduce", 4 * MEGA),)), 0.0, (4.0, 0.0),
                    votes=0, joins=False)  # fmt: skip
    two = [Bucket(1, 0.0), Bucket(1, 0.0)]
    # 0-2 and 2-4 on the wire; decoded 2-4 and 4-6; again on the wire 4-6 and 6-8
    assert timeline(two, method, QUIET, 2, 0.0).seconds == pytest.approx(8.0)
    # one after the other: 2-4 on the wire is waited for after 4-6, the second round of the first
    in_turn = timeline(two, replace(method, in_turn=True), QUIET, 2, 0.0)
    assert in_turn.seconds == pytest.approx(10.0)


def test_small_messages_that_are_ready_together_share_one_latency() -> None:
    ten = [Bucket(1, 0.0)] * 10
    method = Method("small", ((Round("AllGather", 1000.0),),), 0.0, (0.0,), votes=0)
    slow = Network(1.0, 1e12)
    assert timeline(ten, method, slow, 2, 0.0).seconds == pytest.approx(1.0)
    assert timeline(ten, replace(method, joins=False), slow, 2, 0.0).seconds == pytest.approx(10.0)
    assert timeline(ten, replace(method, joins=False), slow, 2, 0.0, lanes=10).seconds == pytest.approx(1.0)
    large = replace(method, rounds=((Round("AllGather", 10 * 2.0**18),),))
    assert timeline(ten, large, slow, 2, 0.0).seconds == pytest.approx(10.0)


def test_collectives_of_one_place_are_both_waited_for() -> None:
    method = Method("mixed", ((Round("AllReduce", MEGA), Round("AllToAll", 2 * MEGA)),), 0.0, (0.0,), votes=0)
    assert timeline([Bucket(1, 0.0)], method, QUIET, 2, 0.0).seconds == pytest.approx(2.0)


def test_groups_have_their_own_sizes_and_links() -> None:
    """Among two machines of four: summed on each, across, and told again."""
    rounds = ((Round("AllReduce", 4 * MEGA, "node"),), (Round("AllReduce", MEGA, "across"),))
    method = Method("hierarchical", rounds, 0.0, (0.0, 0.0), votes=0, joins=False)
    network = Network(0.0, 1e6, local_size=4, node_latency=0.0, node_bandwidth=1e7)
    found = timeline([Bucket(1, 0.0)], method, network, 8, 0.0, local_size=4)
    assert found.seconds == pytest.approx(1.5 * 0.4 + 1.0)


def test_alone_there_is_no_exchange() -> None:
    assert timeline(EQUAL, replace(DDP, votes=1), QUIET, 1, 4.0, after=1.0).seconds == pytest.approx(5.0)


def test_a_gradient_after_the_end_of_backward_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"ready after 4.0 s, but backward ends after 3.0 s"):
        timeline(EQUAL, DDP, QUIET, 2, 3.0)


def test_every_round_has_a_decode_time() -> None:
    with pytest.raises(ConfigError, match=r"some: 1 round\(s\) need as many decode times, not 0"):
        Method("some", ((Round("AllGather", 1.0),),))


@st.composite
def methods(draw: st.DrawFn) -> Method:
    kind = st.sampled_from(["AllReduce", "AllGather", "AllToAll", "ReduceScatter", "Broadcast"])
    seconds = st.floats(0, 2)
    rounds = draw(st.lists(st.builds(Round, kind, st.floats(0, 1e7)), min_size=1, max_size=3))
    decode = tuple(draw(seconds) for _ in rounds)
    flags = [draw(st.booleans()) for _ in range(3)]
    return Method("any", tuple((one,) for one in rounds), draw(seconds), decode, flags[0], 1, flags[1], flags[2])


buckets = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=6).map(
    lambda found: [Bucket(numel, ready) for numel, (_, ready) in
                   zip([n for n, _ in found], sorted(found, key=lambda one: one[1]), strict=True)]
)  # fmt: skip


@given(buckets, methods(), st.integers(2, 64), st.floats(1e-6, 0.1), st.floats(1e4, 1e10), st.integers(1, 3))
def test_slower_links_longer_backward_and_more_work_take_no_less(
    found: list[Bucket], method: Method, size: int, latency: float, bandwidth: float, lanes: int
) -> None:
    def seconds(
        method: Method = method, latency: float = latency, bandwidth: float = bandwidth, compute: float = 1.0
    ) -> float:
        return timeline(found, method, Network(latency, bandwidth), size, compute, lanes=lanes).seconds

    base = seconds() * (1 - 1e-9)
    assert seconds(latency=2 * latency) >= base
    assert seconds(bandwidth=bandwidth / 2) >= base
    assert seconds(compute=1.5) >= base
    assert seconds(replace(method, encode=method.encode + 1)) >= base
    assert seconds(replace(method, decode=tuple(each + 1 for each in method.decode))) >= base


@given(buckets, methods(), st.integers(2, 64), st.floats(1e-6, 0.1), st.floats(1e4, 1e10))
def test_a_step_is_as_long_as_its_work_and_no_longer_than_all_in_turn(
    found: list[Bucket], method: Method, size: int, latency: float, bandwidth: float
) -> None:
    result = timeline(found, method, Network(latency, bandwidth), size, 1.0, after=0.5)
    work = 1.0 + method.encode + sum(method.decode) + 0.5
    assert result.busy("compute") == pytest.approx(work)
    assert work <= result.seconds * (1 + 1e-9)
    assert result.seconds <= (work + result.busy("wire")) * (1 + 1e-9)
    ends = [span.end for span in result.spans]
    assert max(ends) <= result.seconds * (1 + 1e-9)


def test_buckets_are_those_that_the_engine_lays_out() -> None:
    torch.manual_seed(0)
    numels = torch.randint(1, 3_000_000, (40,)).tolist()
    params = [(f"p{i}", nn.Parameter(torch.empty(numel))) for i, numel in enumerate(numels)]
    real = build_buckets(params, lambda name, param: None, 25 * 2**20, 2**20, None, GradientBucket)
    ours = fill_buckets([Parameter(numel, float(i)) for i, numel in enumerate(numels)], 25, 1)
    assert [b.numel for b in ours] == [sum(s.param.numel() for s in bucket.segments) for bucket in real]
    assert ours[-1].ready == 39.0


def test_the_bandwidth_up_to_which_a_method_pays() -> None:
    """4 MB between two ranks against a fixed second: dense takes as long at 4 MB/s."""

    def dense(bandwidth: float) -> float:
        return timeline([Bucket(1, 0.0)], DDP, Network(0.0, bandwidth), 2, 0.0).seconds

    assert break_even(lambda bandwidth: 1.0, dense) == pytest.approx(4e6, rel=1e-6)
    assert break_even(lambda bandwidth: 1e9, dense) is None
    assert break_even(lambda bandwidth: 0.0, dense) == float("inf")


def test_a_thousand_ranks_on_paper_take_no_time() -> None:
    many = [Bucket(10**6, i / 100) for i in range(100)]
    dense = replace(DDP, rounds=((Round("AllReduce", 4e8),),))
    start = time.process_time()
    found = timeline(many, dense, Network(1e-4, 1e9, algorithm="tree"), 1000, 1.0)
    assert time.process_time() - start < 0.5
    assert 1.0 < found.seconds < 2.0
